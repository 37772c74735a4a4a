"""Lowering: turns the compute order of each stage into its full list of actions, with all communication.

It finds the position of each send, receive, gather and reduce. Sends and receives are separate actions, and the receive
of a compute is posted one compute earlier, in warm-up, steady state and cool-down, so that each transfer can overlap
with a whole compute. A receive is never posted earlier, because a receive that waits long occupies a buffer and, on
NCCL, a spinning kernel. Gathers start one chunk ahead of their first use. The gathers of the first two chunks are at
the start of the list and do not need the batch (Schedule.initial_gathers). A reduce follows the chunk's last backward
and the send after it, because another stage waits for that send.
Source: MegaScale sec. 3.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from megatrain.schedule.action import MICROBATCH_ENDS, Action, ActionKind
from megatrain.schedule.chunk_placement import ChunkPlacement
from megatrain.schedule.order import ComputeOrder

RECEIVES_AHEAD = 1
"""Computes between posting a receive and consuming it. One is enough to overlap; each further one occupies a buffer."""


class _MessageActions:
    """The receive before a compute and the send after it. Stages share the objects of equal actions."""

    def __init__(self, placement: ChunkPlacement, num_microbatches: int) -> None:
        self._input = placement.stage_and_chunk(0)
        self._loss = placement.stage_and_chunk(placement.num_parts - 1)
        # created once and shared by all stages: one action for each micro-batch and chunk
        self._actions = {
            kind: [[Action(kind, chunk, mb) for mb in range(num_microbatches)] for chunk in range(placement.num_chunks)]
            for kind in (
                ActionKind.SEND_FORWARD,
                ActionKind.RECV_FORWARD,
                ActionKind.SEND_BACKWARD,
                ActionKind.RECV_BACKWARD,
            )
        }

    def receives(self, stage: int, order: Sequence[Action]) -> list[Action | None]:
        """Return the receive of each compute of `order`; None at the model's input, at the loss, and for wgrads."""
        input_chunk, loss_chunk = self._ends(stage)
        return self._select(order, ActionKind.RECV_FORWARD, input_chunk, ActionKind.RECV_BACKWARD, loss_chunk)

    def sends(self, stage: int, order: Sequence[Action]) -> list[Action | None]:
        """Return the send of each compute of `order`; None at the loss, at the model's input, and for wgrads."""
        input_chunk, loss_chunk = self._ends(stage)
        return self._select(order, ActionKind.SEND_FORWARD, loss_chunk, ActionKind.SEND_BACKWARD, input_chunk)

    def _ends(self, stage: int) -> tuple[int, int]:
        """Return the stage's chunks that hold the model's input and its loss; -1 if another stage holds it."""
        input_chunk, loss_chunk = (chunk if stage == own else -1 for own, chunk in (self._input, self._loss))
        return input_chunk, loss_chunk

    def _select(
        self,
        order: Sequence[Action],
        forward_kind: ActionKind,
        forward_end: int,
        backward_kind: ActionKind,
        backward_end: int,
    ) -> list[Action | None]:
        forwards, backwards = self._actions[forward_kind], self._actions[backward_kind]
        selected: list[Action | None] = []
        for compute in order:
            chunk = compute.chunk
            if compute.kind is ActionKind.FORWARD:
                selected.append(None if chunk == forward_end else forwards[chunk][compute.microbatch])
            elif compute.kind is ActionKind.WGRAD:
                selected.append(None)
            else:
                selected.append(None if chunk == backward_end else backwards[chunk][compute.microbatch])
        return selected


def lower(
    orders: Sequence[ComputeOrder],
    placement: ChunkPlacement,
    num_microbatches: int,
    receives_ahead: int = RECEIVES_AHEAD,
) -> tuple[tuple[Action, ...], ...]:
    """Return each stage's full action list. A receive is posted `receives_ahead` computes before its consumer."""
    messages = _MessageActions(placement, num_microbatches)
    gathers = [Action(ActionKind.GATHER, chunk, -1) for chunk in range(placement.num_chunks)]
    reduces = [Action(ActionKind.REDUCE, chunk, -1) for chunk in range(placement.num_chunks)]
    return tuple(
        _lower_stage(
            order, messages.receives(stage, order), messages.sends(stage, order), gathers, reduces, receives_ahead
        )
        for stage, order in enumerate(orders)
    )


def _lower_stage(
    order: ComputeOrder,
    receives: list[Action | None],
    sends: list[Action | None],
    gathers: list[Action],
    reduces: list[Action],
    receives_ahead: int,
) -> tuple[Action, ...]:
    ends_left = Counter(compute.chunk for compute in order if compute.kind in MICROBATCH_ENDS)
    chunks = list(dict.fromkeys(compute.chunk for compute in order if compute.kind is ActionKind.FORWARD))
    # the gathers of the first two chunks come first; from the second chunk on, the gather of the next chunk precedes a
    # chunk's first forward
    gather_before = {chunk: gathers[following] for chunk, following in pairwise(chunks[1:])}
    actions: list[Action] = [gathers[chunk] for chunk in chunks[:2]]
    # receives[i] is the input of compute i: it is posted `receives_ahead` computes before, so that the message
    # is in transfer during a compute
    actions += (receive for receive in receives[:receives_ahead] if receive is not None)
    for slot, compute in enumerate(order):
        due = slot + receives_ahead
        if due < len(receives) and (receive := receives[due]) is not None:
            actions.append(receive)
        if compute.kind is ActionKind.FORWARD and compute.chunk in gather_before:
            actions.append(gather_before.pop(compute.chunk))  # only before its first forward
        actions.append(compute)
        # the send goes before the reduction: a neighboring stage waits for the send, but no rank for the reduction yet
        if (send := sends[slot]) is not None:
            actions.append(send)
        if compute.kind in MICROBATCH_ENDS:
            ends_left[compute.chunk] -= 1
            if ends_left[compute.chunk] == 0:
                actions.append(reduces[compute.chunk])
    return tuple(actions)
