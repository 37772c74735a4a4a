"""How long the computes of a model chunk take, in any one unit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComputeDurations:
    """How long the computes of a model chunk take for one micro-batch, in any one unit; backward is dgrad + wgrad."""

    forward: float
    dgrad: float
    wgrad: float

    @property
    def total(self) -> float:
        return self.forward + self.dgrad + self.wgrad


EQUAL_DURATIONS = ComputeDurations(1, 1, 1)
"""Each has as many multiplications: the product with a weight in forward, and its two products in backward."""
