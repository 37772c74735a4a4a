"""Compute orders: the forwards and backwards of every stage, in the order in which the stage runs them.

A generator of a schedule yields these alone; lowering.py adds the communication. Every schedule here is one weave of
two sequences, which all stages share: warm-up forwards, then one forward and one backward in turn, then the backwards
that are left. Schedules differ in the sequences and in the number of warm-up forwards; one puts the weights' halves of
the backwards in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.schedule.action import Action

ComputeOrder = list[Action]


def weave(forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int) -> ComputeOrder:
    """Return the order of a stage that runs `num_warmup` forwards before it alternates."""
    num_steady = len(forwards) - num_warmup
    order = list(forwards[:num_warmup])
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        order += (forward, backward)
    order += backwards[num_steady:]
    return order
