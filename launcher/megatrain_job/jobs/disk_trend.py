"""When a disk will be full, by how its free space has changed. Pure.

Checkpoints come in bursts and old ones are removed, so that free space goes up and down: a disk fills only if each part
of a long period had less space than the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

LEAST_S = 600.0
"""A shorter period shows nothing: perhaps only one checkpoint was written in it."""
_NUM_PARTS = 4


@dataclass(frozen=True, slots=True)
class SpaceSample:
    """Free space at a moment of a monotonic clock."""

    at_s: float
    free_bytes: int


def full_in_s(samples: Sequence[SpaceSample]) -> float | None:
    """Return in how many seconds the disk will be full at this rate; None if it does not fill, or that is not known.

    `samples`: oldest first.
    """
    if not samples or (length_s := samples[-1].at_s - samples[0].at_s) < LEAST_S:
        return None
    part_s = length_s / _NUM_PARTS
    parts: list[list[int]] = [[] for _ in range(_NUM_PARTS)]
    for sample in samples:
        number = int((sample.at_s - samples[0].at_s) / part_s)
        parts[min(number, _NUM_PARTS - 1)].append(sample.free_bytes)
    if not all(parts):
        return None
    free = [median(part) for part in parts]
    if any(after >= before for before, after in pairwise(free)):
        return None
    return samples[-1].free_bytes * (_NUM_PARTS - 1) * part_s / (free[0] - free[-1])
