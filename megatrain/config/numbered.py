"""Sections that a configuration may have several of: `[[slack]]` twice is `[slack]` and `[slack-2]`.

So each has a name, which keys, origins, overrides and messages use; the second form may also be written directly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

MOST = 16
"""Per kind. Each receiver of notifications is a thread of the driver's host; each parameter group has buckets."""


def numbered_name(kind: str, number: int) -> str:
    """Return the name of the section of a kind with a number, counted from 1."""
    return kind if number == 1 else f"{kind}-{number}"


def kind_of(section: str, kinds: Collection[str]) -> str:
    """Return the kind of a section by its name; empty if it is none of these."""
    kind, _, number = section.rpartition("-")
    if section in kinds:
        return section
    is_further = kind in kinds and number.isascii() and number.isdigit() and 2 <= int(number[:4]) <= MOST
    return kind if is_further and section == numbered_name(kind, int(number)) else ""


def split_arrays(tables: Mapping[str, object], kinds: Collection[str]) -> tuple[dict[str, object], list[str]]:
    """Return tables with each array of these kinds as separate sections, and a sentence on what is wrong with that."""
    found: dict[str, object] = {}
    problems = []
    for name, value in tables.items():
        if name not in kinds or not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
            found[name] = value
            continue
        for number, table in enumerate(value, start=1):
            section = numbered_name(name, number)
            if number > MOST:
                text = f"[[{name}]] appears {len(value)} times, and at most {MOST} are allowed; remove some"
                problems.append(text)
                break
            if number > 1 and section in tables:
                problems.append(
                    f"[{section}] and the {number}. [[{name}]] are the same section; use one of the two forms"
                )
            found[section] = table
    return found, problems
