"""From nested tables of raw values to typed values: unknown sections, unknown keys, wrong types, missing keys.

Reading never stops at a mistake. The key that a misspelled name probably means is recorded as doubtful, so that one
typing error is not also reported as a missing key or as a broken rule.

A configuration may have several sections of some kinds: two tables `[[slack]]` are the same as `[slack]` and
`[slack-2]`, which a file may also use directly. Keys, origins, overrides and messages use these names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megatrain.config.options import Option, Value, WrongTypeError
from megatrain.config.origin import ValueOrigin
from megatrain.config.problem import Problem, closest_name
from megatrain.config.toml_text import setting
from megatrain.contracts.layout import SIZED_AXES
from megatrain.formatting import alternatives

_MAX_NUMBER = 16
_MAX_NUMBER_OF = {"data_source": 1024, "data_stage": 256, "validation_set": 64}
"""Limits that differ from _MAX_NUMBER, which is low because each receiver has a thread, and each parameter group has
buckets of its own."""


class TableReader:
    """Collects values and problems from one table after another; later tables win."""

    def __init__(self, sections: Mapping[str, Mapping[str, Option]]) -> None:
        self._sections = sections
        self.values: dict[str, dict[str, Value]] = {}
        self.origins: dict[str, ValueOrigin] = {}
        self.problems: list[str] = []
        self.doubtful: set[str] = set()
        """Keys ("section.key") whose value is wrong or was probably given under another name."""

    def read(self, tables: Mapping[str, object], origins: Mapping[str, ValueOrigin]) -> None:
        """Read the values of `tables`; `origins` holds the origins of keys ("section.key") and of sections."""
        for written, table in tables.items():
            section = written
            if written not in self._sections:
                found = self._report_unknown_section(written, table, tables, origins)
                if found is None:
                    continue
                section = found
            if isinstance(table, Mapping):
                for name, value in table.items():
                    self._read_key(section, name, value, origins.get(f"{written}.{name}"))
            else:
                text = f"{setting(section, table)} must be a section; write its keys below a line [{section}]"
                self._report(text, (section,), origins)
                self.doubtful.update(f"{section}.{name}" for name in self._sections[section])

    def require_all(self, origins: Mapping[str, ValueOrigin], fallback: ValueOrigin | None) -> None:
        """Report the required keys that no table gave, at the origin of their section or else of the `fallback`."""
        for section, options in self._sections.items():
            for option in options.values():
                key = f"{section}.{option.name}"
                if not option.is_required or option.name in self.values.get(section, {}) or key in self.doubtful:
                    continue
                self.doubtful.add(key)
                text = f"{key} is missing and has no default; add {option.name} = {_example(option)} under [{section}]"
                location = origins.get(section, fallback)
                self._report(text, (section,), {} if location is None else {section: location})

    def _read_key(self, section: str, name: str, value: object, origin: ValueOrigin | None) -> None:
        key = f"{section}.{name}"
        origins = {} if origin is None else {key: origin}
        option = self._sections[section].get(name)
        if option is None and (rule := missing_parallelism(name, self._sections)):
            self._report(f"{setting(key, value)} cannot be set: {rule}", (key,), origins)
            return
        if option is None:
            meant = suggestions(name, section, self._sections)
            self.doubtful.update(meant)
            known = alternatives(tuple(self._sections[section]))
            hint = f"did you mean {alternatives(meant)}?" if meant else f"the keys of [{section}] are {known}"
            self._report(f"{setting(key, value)} is not a known key; {hint}", (key,), origins)
            return
        try:
            parsed = option.parse(value)
        except WrongTypeError as error:
            self.doubtful.add(key)
            self._report(f"{setting(key, value)} {error}", (key,), origins)
            return
        self.values.setdefault(section, {})[name] = parsed
        self.origins |= origins

    def _report_unknown_section(
        self, written: str, table: object, tables: Mapping[str, object], origins: Mapping[str, ValueOrigin]
    ) -> str | None:
        """Report an unknown section; return the section that was probably meant, or None if its keys cannot be read."""
        if not isinstance(table, Mapping) and (rule := missing_parallelism(written, self._sections)):
            self._report(f"{setting(written, table)} cannot be set: {rule}", (written,), origins)
            return None
        if not isinstance(table, Mapping):
            meant = suggestions(written, None, self._sections)
            self.doubtful.update(meant)
            hint = f"did you mean {alternatives(meant)}?" if meant else "put it below the line of its [section]"
            self._report(f"{setting(written, table)} is outside any section; {hint}", (written,), origins)
            return None
        close = closest_name(written, self._sections)
        hint = f"did you mean [{close}]?" if close else f"the sections are {alternatives(tuple(self._sections))}"
        keys = (written, *(f"{written}.{name}" for name in table))
        self._report(f"[{written}] is not a known section; {hint}", keys, origins)
        return close if close not in tables else None

    def _report(self, text: str, keys: tuple[str, ...], origins: Mapping[str, ValueOrigin]) -> None:
        self.problems.append(Problem(keys, text).located(origins))


def suggestions(name: str, section: str | None, sections: Mapping[str, Mapping[str, Option]]) -> tuple[str, ...]:
    """Return the keys ("section.key") that an unknown `name`, written in `section`, probably meant."""
    elsewhere = tuple(f"{other}.{name}" for other, options in sections.items() if name in options)
    if elsewhere:
        return elsewhere
    searched = {section: sections[section]} if section else sections
    found = {key: other for other, options in searched.items() for key in options}
    close = closest_name(name, found)
    return () if close is None else (f"{found[close]}.{close}",)


def missing_parallelism(name: str, sections: Mapping[str, Mapping[str, Option]]) -> str:
    """Return why a size of the layout cannot be set if it is the key of no section; empty for all other names."""
    axis = next((axis for axis in SIZED_AXES if axis.size_name == name), None)
    if axis is None or any(name in options for options in sections.values()):
        return ""
    return f"{axis.title} parallelism is not implemented; leave {name} out"


def _example(option: Option) -> str:
    return "3e-4" if option.kind == "float" else "N"


def numbered_name(kind: str, number: int) -> str:
    """Return the name of the section of a kind with a number, counted from 1."""
    return kind if number == 1 else f"{kind}-{number}"


def kind_of(section: str, kinds: Collection[str]) -> str:
    """Return the kind of a section by its name; empty if it is none of `kinds`."""
    if section in kinds:
        return section
    kind, _, number = section.rpartition("-")
    is_number = kind in kinds and number.isascii() and number.isdigit() and len(number) <= len(str(_max_number(kind)))
    is_further = is_number and 2 <= int(number) <= _max_number(kind)
    return kind if is_further and section == numbered_name(kind, int(number)) else ""


def number_of(section: str, kind: str) -> int:
    """Return the number, counted from 1, of a section of this kind."""
    return 1 if section == kind else int(section.removeprefix(f"{kind}-"))


def _max_number(kind: str) -> int:
    return _MAX_NUMBER_OF.get(kind, _MAX_NUMBER)


def split_arrays(tables: Mapping[str, object], kinds: Collection[str]) -> tuple[dict[str, object], list[str]]:
    """Return `tables` with each array of these kinds as separate sections, and the problems found."""
    found: dict[str, object] = {}
    problems = []
    for name, value in tables.items():
        if name not in kinds or not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            found[name] = value
            continue
        if not value:
            problems.append(f"{name}=[] has no sections; write one below a line [[{name}]], or remove {name}")
        for number, table in enumerate(value, start=1):
            section = numbered_name(name, number)
            if number > _max_number(name):
                text = (
                    f"[[{name}]] appears {len(value)} times, and at most {_max_number(name)} are allowed; remove some"
                )
                problems.append(text)
                break
            if number > 1 and section in tables:
                problems.append(
                    f"[{section}] and [[{name}]] number {number} are the same section; use one of the two forms"
                )
            found[section] = table
    return found, problems
