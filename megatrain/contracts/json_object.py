"""Reading small JSON files that somebody may have cut short, edited or made up.

Every error names the file and the field, the value found and the rule. Nothing is converted silently: true is no
integer, and a field that this program does not know is refused.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any, Self

from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.sample_ranges import SampleRanges, ranges_problem

_TOO_LARGE = 2**63
"""No count in a file reaches this: it would not fit the integers of other programs."""

_MAX_SHOWN = 100
"""Characters of a wrong value that an error repeats."""


def renamed(raw: Mapping[str, Any], former_names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields under their names of now. One that is there under its new name too keeps its former one."""
    return {name if (now := former_names.get(name, name)) in raw else now: value for name, value in raw.items()}


class JsonObject:
    """The fields of a JSON object, taken out by kind. `place` names the file in errors, `prefix` the object in it."""

    def __init__(self, raw: Mapping[str, Any], place: str, schema_version: int, prefix: str = "") -> None:
        self._raw = raw
        self._place = place
        self._schema_version = schema_version
        self._prefix = prefix

    @classmethod
    def parse(
        cls,
        content: bytes | str,
        place: str,
        schema_version: int,
        damage: str,
        former_names: Mapping[str, str] | None = None,
    ) -> Self:
        """Return the object that a file holds; `damage` says what a file that is no JSON means.

        `former_names`: what fields were called in the schema version before, which is then read too.

        Raises: CheckpointError when it is no JSON object or of another schema version.
        """
        try:
            raw = json.loads(content if isinstance(content, str) else content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{place}: not UTF-8 ({error.reason}); {damage}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{place}: not JSON ({error}); {damage}") from error
        if not isinstance(raw, dict):
            raise CheckpointError(f"{place}: a {type(raw).__name__}, expected a JSON object; {damage}")
        found = raw.get("schema_version")
        if former_names is not None and found == schema_version - 1 and not isinstance(found, bool):
            return cls(renamed(raw, former_names), place, found)
        if found != schema_version or isinstance(found, bool):
            former = "" if former_names is None else f"{schema_version - 1} and "
            raise CheckpointError(
                f"{place}: schema_version={found!r}, this program reads {former}{schema_version}; use the program that"
                " wrote it"
            )
        return cls(raw, place, schema_version)

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def error(self, name: str, rule: str) -> CheckpointError:
        """Return the error that a field breaks a rule."""
        value = repr(self._raw.get(name))
        shown = value if len(value) <= _MAX_SHOWN else value[:_MAX_SHOWN] + "..."
        found = f"={shown}" if name in self._raw else " is missing"
        return CheckpointError(f"{self._place}: {self._prefix}{name}{found}; {rule}")

    def check_names(self, kind: type[Any], *more: str) -> None:
        """Refuse a field that is neither one of the dataclass `kind` nor one of `more`."""
        self.check_known({field.name for field in fields(kind)}.union(more))

    def check_known(self, known: Collection[str]) -> None:
        """Refuse a field that is not one of these."""
        for name in self._raw:
            if name not in known:
                raise self.error(name, f"no such field in schema version {self._schema_version}")

    def text(self, name: str) -> str:
        value = self._raw.get(name)
        if not isinstance(value, str):
            raise self.error(name, "expected a string")
        return value

    def flag(self, name: str) -> bool:
        value = self._raw.get(name)
        if not isinstance(value, bool):
            raise self.error(name, "expected true or false")
        return value

    def count(self, name: str, least: int = 0) -> int:
        value = self._raw.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _TOO_LARGE:
            raise self.error(name, f"expected an integer of at least {least} and below 2^63")
        return value

    def is_null(self, name: str) -> bool:
        """Say whether the field is there and null."""
        return name in self._raw and self._raw[name] is None

    def seconds(self, name: str) -> float:
        """Return a time or duration: a finite number, not negative."""
        value = self._raw.get(name)
        # neither NaN nor infinity, which JSON of Python may hold, passes the comparison
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _TOO_LARGE:
            raise self.error(name, "expected a number of seconds, at least 0")
        return float(value)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._raw.get(name)
        if not isinstance(value, dict):
            raise self.error(name, "expected an object")
        return value

    def sample_ranges(self, name: str) -> SampleRanges:
        """Return the ranges of samples that a field holds; none where it is not there."""
        value = self._raw.get(name, [])
        rule = "expected a list of [first, end]"
        if not isinstance(value, list):
            raise self.error(name, rule)
        ranges: list[tuple[int, int]] = []
        for pair in value:
            if not isinstance(pair, list) or [type(one) for one in pair] != [int, int]:
                raise self.error(name, rule)
            ranges.append((pair[0], pair[1]))
        problem = ranges_problem(tuple(ranges))
        if problem is not None:
            raise self.error(name, problem)
        return tuple(ranges)

    def section(self, name: str) -> JsonObject:
        """Return the object that a field holds, to be read in the same way."""
        return JsonObject(self.mapping(name), self._place, self._schema_version, f"{self._prefix}{name}.")
