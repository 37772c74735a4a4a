"""What a part of the model needs in memory for one micro-batch, and how parts in a row add up.

A ledger follows the code of a part: what comes to life is held, what dies is released, and the peak is the most that
was alive together. All numbers are relative to the memory before the part's forward. A part's input belongs to the part
that reads it, because that part keeps it for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class Ledger:
    """Bytes alive, and the most so far. is_split: products that give weights' gradients are put off."""

    def __init__(self, live: int = 0, *, is_split: bool = False) -> None:
        self.live = live
        self.peak = live
        self.put_off = 0
        """What such products keep alive."""
        self._is_split = is_split

    def hold(self, *sizes: int) -> None:
        """Count tensors that come to life together and stay."""
        self.live += sum(sizes)
        self.peak = max(self.peak, self.live)

    def release(self, *sizes: int) -> None:
        """Count tensors that die."""
        self.live -= sum(sizes)

    def release_factors(self, *sizes: int) -> None:
        """Count factors of a weight's gradient, which die with their product: now, or when it is made up for."""
        if self._is_split:
            self.put_off += sum(sizes)
        else:
            self.release(*sizes)

    def hold_factor(self, size: int) -> None:
        """Count what is made for a product that is put off."""
        self.hold(size)
        self.put_off += size

    def share_factor(self, size: int) -> None:
        """Count a factor of a weight's gradient that lives on after the product, but not until it is made up for."""
        if self._is_split:
            self.put_off += size

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
    """Most at once during its backward, with what is still kept; where that is split, during its half for the input."""
    on_host: int = 0
    """From its forward to its backward, in host memory instead."""
    put_off: int = 0
    """From one half of its backward to the other, where that is split: the factors of weights' gradients."""


def in_a_row(parts: Sequence[Footprint]) -> Footprint:
    """Return the footprint of parts that run one after the other, backward in reverse order."""
    kept = forward = backward = on_host = put_off = 0
    for part in parts:
        forward = max(forward, kept + part.forward)
        # the parts before this one run backward beside what this one puts off
        backward = max(backward + part.put_off, kept + part.backward)
        kept += part.kept
        on_host += part.on_host
        put_off += part.put_off
    return Footprint(kept, forward, backward, on_host, put_off)
