"""Ranges of the sample order that a job leaves out, because training on them failed. Pure functions: no I/O, no clock.

A range is (first, end), and `end` is exclusive. Ranges are ascending and do not touch, so equal sets of samples have
equal ranges. Sources: ADR 0023; PaLM (arXiv:2204.02311) sec. 5.1 skipped batches in this way.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from megatrain.formatting import count_text

SampleRanges = tuple[tuple[int, int], ...]

_TOO_LARGE = 2**62


def merged(ranges: Iterable[tuple[int, int]]) -> SampleRanges:
    """Return the union of all ranges as ranges that ascend and do not touch."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif first < end:
            found.append((first, end))
    return tuple(found)


def ranges_problem(ranges: SampleRanges) -> str | None:
    """Return the rule that the ranges break, None if they are valid."""
    if any(not 0 <= first < end < _TOO_LARGE for first, end in ranges):
        return "expected ranges [first, end] with 0 <= first < end"
    if any(end >= first for (_, end), (first, _) in pairwise(ranges)):
        return "expected ranges that ascend and do not touch"
    return None


def position_after(cursor: int, count: int, skipped: SampleRanges) -> int:
    """Return the position that follows `count` samples from `cursor` on, not counting samples that are left out."""
    position = cursor + count
    for first, end in skipped:
        if end > cursor and position >= (start := max(first, cursor)):
            position += end - start
    return position


def num_kept(first: int, end: int, skipped: SampleRanges) -> int:
    """Return how many of the samples from number `first` to `end`, which is exclusive, are not left out."""
    return end - first - sum(max(0, min(end, last) - max(first, begin)) for begin, last in skipped)


def samples_text(ranges: SampleRanges) -> str:
    """Return the last four ranges as text, by their first and last samples, and how many ranges precede them."""
    shown = ", ".join(f"{first} to {end - 1}" for first, end in ranges[-4:])
    return f"{shown} and {count_text(len(ranges) - 4, 'range')} before" if len(ranges) > 4 else shown
