"""The values that a message proposes in place of a wrong one."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

_MAX_PROPOSED = 8


def nearest(candidates: Iterable[int], found: int) -> tuple[int, ...]:
    """Return the few candidates closest to `found`, in ascending order."""
    closest = sorted(candidates, key=lambda candidate: (abs(candidate - found), candidate))
    return tuple(sorted(closest[:_MAX_PROPOSED]))


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive number in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))


def multiples_around(divisor: int, found: int) -> tuple[int, ...]:
    """Return the positive multiples of `divisor` next to `found`: one below, if there is one, and one above."""
    below = found // divisor * divisor
    return tuple(multiple for multiple in (below, below + divisor) if multiple > 0)


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, or None."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None
