"""What a part of the model needs in memory for one micro-batch, and how parts in a row add up.

A ledger follows the code of a part: what comes to life is held, what dies is released, and the peak is the most that
was alive together. All numbers are relative to the memory before the part's forward. A part's input belongs to the part
that reads it, because that part keeps it for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class Ledger:
    """Bytes alive, and the most so far."""

    def __init__(self, live: int = 0) -> None:
        self.live = live
        self.peak = live

    def hold(self, *sizes: int) -> None:
        """Count tensors that come to life together and stay."""
        self.live += sum(sizes)
        self.peak = max(self.peak, self.live)

    def release(self, *sizes: int) -> None:
        """Count tensors that die."""
        self.live -= sum(sizes)

    def visit(self, *sizes: int) -> None:
        """Count tensors that are alive together for a moment only."""
        self.peak = max(self.peak, self.live + sum(sizes))


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one part of the model for one micro-batch."""

    kept: int
    """From its forward to its backward."""
    forward: int
    """Most at once during its forward, with what it keeps."""
    backward: int
    """Most at once during its backward, with what is still kept."""
    on_host: int = 0
    """From its forward to its backward, in host memory instead."""


def in_a_row(parts: Sequence[Footprint]) -> Footprint:
    """Return the footprint of parts that run one after the other, backward in reverse order."""
    kept = forward = backward = on_host = 0
    for part in parts:
        forward = max(forward, kept + part.forward)
        backward = max(backward, kept + part.backward)
        kept += part.kept
        on_host += part.on_host
    return Footprint(kept, forward, backward, on_host)
