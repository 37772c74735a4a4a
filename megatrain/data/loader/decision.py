"""What a data loader reads next: a pure function of the shares of its plan and the words of its ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from megatrain.data.loader.plan import Share
from megatrain.data.loader.ring import RingState


@dataclass(frozen=True, slots=True)
class Fill:
    """Read a step of a share (its number in the plan) into its slot."""

    share: int
    step: int


class Idle(Enum):
    """Why there is nothing to read."""

    FULL = auto()
    """All slots are full until the ranks are done with a step."""
    COMPLETE = auto()
    """The ring has all the steps that ranks still need, so the loader ends."""


def decide(shares: Sequence[Share], num_steps: int, depth: int, state: RingState) -> Fill | Idle:
    """Return the earliest step that a rank needs and that no slot has. num_steps: the number of steps of the plan."""
    missing: list[tuple[int, int]] = []
    is_complete = True
    for number, share in enumerate(shares):
        # all readers of the share are done with the steps below this one, so the slot of step `first` - 1 + depth is
        # free
        first = min(state.done[reader] for reader in share.readers)
        end = min(first + depth, num_steps)
        is_complete &= end == num_steps
        filled = state.filled[number]
        missing += [(step, number) for step in range(first, end) if filled[step % depth] != step + 1][:1]
    if missing:
        step, share_number = min(missing)
        return Fill(share_number, step)
    return Idle.COMPLETE if is_complete else Idle.FULL
