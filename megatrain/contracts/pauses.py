"""The pauses between repeated attempts."""

from __future__ import annotations

from collections.abc import Iterator


def growing_pauses(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield pauses in seconds without end: each is twice the one before, up to the longest."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)
