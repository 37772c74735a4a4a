"""Format lists of ranks, names and alternatives for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def ranks_text(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0-3, 6"; "" for no ranks."""
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
    """Return "a, b and c". For more than `most` names, return the first ones and the number of the others."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1:,} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def alternatives(texts: Sequence[object]) -> str:
    """Return "a, b or c"."""
    items = [str(text) for text in texts]
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} or {items[-1]}"
