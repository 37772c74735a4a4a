"""Names, ranks and counts as people read them: the same in the driver's reasons and in every verb. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

NaturalKey = tuple[tuple[tuple[str, int], ...], str]

_NUMBER = re.compile(r"([0-9]+)")


def natural_order(name: str) -> NaturalKey:
    """Return what names are sorted by, so that host-2 comes before host-10; no two names are equal."""
    parts = _NUMBER.split(name)
    return tuple(zip(parts[::2], (*(int(number) for number in parts[1::2]), -1), strict=True)), name


def count_text(number: int, one: str, many: str = "") -> str:
    """Return "1 host" or "1,250 hosts"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0-3, 6"; empty for none."""
    ordered = sorted(set(ranks))
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {ranges_text(ordered)}" if ordered else ""


def ranges_text(numbers: Iterable[int]) -> str:
    """Return "0-3, 6"."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def names_text(names: Sequence[str], most: int = 8) -> str:
    """Return "a, b and c", or the first of many with the number of the others."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1:,} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
