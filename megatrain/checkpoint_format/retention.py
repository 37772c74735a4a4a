"""Chooses which checkpoints of a branch to remove. Pure functions: no I/O and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

KEPT_BY_TIME = 3


def resolved_keep_last(keep_last: int, interval: int) -> int:
    """Return how many of the newest checkpoints a configuration keeps, 0 for all.

    keep_last: -1 means all if checkpoints are taken every `interval` steps, and KEPT_BY_TIME if by time (interval 0).
    """
    if keep_last >= 0:
        return keep_last
    return 0 if interval else KEPT_BY_TIME


def to_remove(steps: Sequence[int], kept: AbstractSet[int], keep_last: int, keep_every: int) -> list[int]:
    """Return the steps to remove, oldest first.

    Kept are those in `kept`, the newest `keep_last` (0: all), the multiples of `keep_every` (0: none), and always the
    newest one.
    """
    if keep_last == 0:
        return []
    older = sorted(set(steps))[:-keep_last]
    return [step for step in older if step not in kept and not (keep_every and step % keep_every == 0)]
