"""Compute orders: the forwards and backwards of every stage, in the order in which the stage runs them; and how long
they take, in any unit.

The generator of a schedule returns only compute orders; lowering.py adds the communication. Every schedule here merges
two sequences that are the same on all stages: warm-up forwards, then one forward and one backward in turn, then the
remaining backwards. Schedules differ in the sequences and in the number of warm-up forwards; zero bubble also inserts
the wgrads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.schedule.action import Action

ComputeOrder = list[Action]


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int) -> ComputeOrder:
    """Return the order of a stage that runs `num_warmup` forwards before it alternates."""
    num_steady = len(forwards) - num_warmup
    order = list(forwards[:num_warmup])
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        order += (forward, backward)
    order += backwards[num_steady:]
    return order


@dataclass(frozen=True, slots=True)
class ComputeDurations:
    """How long the computes of a model chunk take for one micro-batch, in any unit; backward is dgrad + wgrad."""

    forward: float
    dgrad: float
    wgrad: float

    @property
    def total(self) -> float:
        return self.forward + self.dgrad + self.wgrad


EQUAL_DURATIONS = ComputeDurations(1, 1, 1)
"""Each takes one GEMM per weight, with the same number of multiplications."""
