"""Read small JSON files that may be truncated, edited or forged.

Every error names the file, the field, the value found and the rule. Nothing is converted silently: true is not an
integer, and an unknown field is refused.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any, Self, get_type_hints

from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.sample_ranges import SampleRanges, ranges_problem

_TOO_LARGE = 2**63
"""Counts in a file must be below this, because larger numbers do not fit into the integers of other programs."""

_MAX_SHOWN = 100
"""How many characters of a wrong value an error shows."""


class JsonObject:
    """The fields of a JSON object, read by kind. `location` names the file in errors, `prefix` the object in it."""

    def __init__(self, raw: Mapping[str, Any], location: str, schema_version: int, prefix: str = "") -> None:
        self._raw = raw
        self._location = location
        self._schema_version = schema_version
        self._prefix = prefix

    @classmethod
    def parse(cls, content: bytes | bytearray | str, location: str, schema_version: int, damage: str) -> Self:
        """Parse the object in a file. `damage` ends the error for a file that is not a JSON object.

        Raises: CheckpointError when it is not a JSON object, or is of another schema version.
        """
        try:
            raw = json.loads(content if isinstance(content, str) else content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{location}: not UTF-8 ({error.reason}); {damage}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{location}: not JSON ({error}); {damage}") from error
        if not isinstance(raw, dict):
            raise CheckpointError(f"{location}: a {type(raw).__name__}, expected a JSON object; {damage}")
        found = raw.get("schema_version")
        if found != schema_version or isinstance(found, bool):
            raise CheckpointError(
                f"{location}: schema_version={found!r}, this program reads {schema_version}; use the program that"
                " wrote it"
            )
        return cls(raw, location, schema_version)

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def error(self, name: str, rule: str) -> CheckpointError:
        """Return the error for a field that breaks a rule."""
        value = repr(self._raw.get(name))
        shown = value if len(value) <= _MAX_SHOWN else value[:_MAX_SHOWN] + "..."
        found = f"={shown}" if name in self._raw else " is missing"
        return CheckpointError(f"{self._location}: {self._prefix}{name}{found}; {rule}")

    def check_names(self, kind: type[Any], *more: str) -> None:
        """Refuse a field unless it belongs to the dataclass `kind` or to `more`."""
        self.check_known({field.name for field in fields(kind)}.union(more))

    def check_known(self, known: Collection[str]) -> None:
        """Refuse a field that is not one of these."""
        for name in self._raw:
            if name not in known:
                raise self.error(name, f"no such field in schema version {self._schema_version}")

    def scalars(self, kind: type[Any]) -> dict[str, Any]:
        """Return the fields of the dataclass `kind` that are scalars, read by their types.

        A str is read as a text, a bool as a flag, an int as a count, and a float as a time in seconds. A field whose
        type also allows None may be null.
        """
        readers = {str: self.text, bool: self.flag, int: self.count, float: self.seconds}
        found: dict[str, Any] = {}
        for name, hint in get_type_hints(kind).items():
            for scalar, read in readers.items():
                if hint in (scalar, scalar | None):
                    found[name] = None if hint is not scalar and self.is_null(name) else read(name)
        return found

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
        """Return whether the field exists and is null."""
        return name in self._raw and self._raw[name] is None

    def seconds(self, name: str) -> float:
        """Return a time or duration: a finite number, not negative."""
        value = self._raw.get(name)
        # the comparison excludes NaN and infinity, which Python's JSON parser accepts
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _TOO_LARGE:
            raise self.error(name, "expected a number of seconds, at least 0")
        return float(value)

    def counts(self, name: str) -> tuple[int, ...]:
        """Return the integers in a list, each at least 0."""
        value = self._raw.get(name)
        if not isinstance(value, list) or any(
            type(number) is not int or not 0 <= number < _TOO_LARGE for number in value
        ):
            raise self.error(name, "expected a list of integers of at least 0 and below 2^63")
        return tuple(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the strings in a list."""
        value = self._raw.get(name)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.error(name, "expected a list of strings")
        return tuple(value)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._raw.get(name)
        if not isinstance(value, dict):
            raise self.error(name, "expected an object")
        return value

    def sample_ranges(self, name: str) -> SampleRanges:
        """Return the ranges of samples in a field; empty when the field is missing."""
        value = self._raw.get(name, [])
        rule = "expected a list of [first, end]"
        if not isinstance(value, list):
            raise self.error(name, rule)
        ranges: list[tuple[int, int]] = []
        for pair in value:
            if not isinstance(pair, list) or [type(end) for end in pair] != [int, int]:
                raise self.error(name, rule)
            ranges.append((pair[0], pair[1]))
        problem = ranges_problem(tuple(ranges))
        if problem is not None:
            raise self.error(name, problem)
        return tuple(ranges)

    def sections(self, name: str) -> list[JsonObject]:
        """Return a reader of each object in a list."""
        value = self._raw.get(name)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.error(name, "expected a list of objects")
        prefix = f"{self._prefix}{name}"
        return [
            JsonObject(item, self._location, self._schema_version, f"{prefix}[{number}].")
            for number, item in enumerate(value)
        ]

    def section(self, name: str) -> JsonObject:
        """Return a reader of the object in a field."""
        return JsonObject(self.mapping(name), self._location, self._schema_version, f"{self._prefix}{name}.")
