"""How long the computes of a model chunk take, in any one unit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComputeDurations:
    """How long the computes of a model chunk take for one microbatch, in any one unit; backward is both its halves."""

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def total(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


EQUAL_DURATIONS = ComputeDurations(1, 1, 1)
"""As many multiplications each: those of a product with a weight, and of its two products in backward."""
