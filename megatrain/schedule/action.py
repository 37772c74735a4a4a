"""The vocabulary of a pipeline schedule: actions, and each stage's list of them.

A stage executes its list in order. Every action returns at once except the computes, which first wait for what they
consume. A backward is one compute, or two where a schedule splits it. Which stage holds which part of the model is in
placement.py. Messages from one stage to another in one direction form a channel, first in, first out: its n-th send is
received by its n-th receive.
Source: the list-of-actions form is that of torch.distributed.pipelining and DeepSpeed; the semantics here are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

from megatrain.schedule.placement import Placement


class ActionKind(Enum):
    """What a stage does in one action."""

    FORWARD = "forward"
    """Wait for the input and for the chunk's parameters, then compute."""
    BACKWARD = "backward"
    """Wait for the output's gradient, then compute the gradients of input and weights."""
    BACKWARD_INPUT = "backward_input"
    """Wait for the output's gradient, then compute the input's; put the products that give weights' gradients off."""
    BACKWARD_WEIGHT = "backward_weight"
    """Carry out the products that this microbatch's BACKWARD_INPUT put off."""
    SEND_FORWARD = "send_forward"
    """Post the output of this chunk to the next model chunk; its buffer is released when delivered."""
    RECV_FORWARD = "recv_forward"
    """Post the receive of this chunk's input."""
    SEND_BACKWARD = "send_backward"
    """Post the gradient of this chunk's input to the previous model chunk."""
    RECV_BACKWARD = "recv_backward"
    """Post the receive of the gradient of this chunk's output."""
    GATHER = "gather"
    """Start gathering the chunk's parameters over data-parallel ranks; those that are whole already stay so."""
    REDUCE = "reduce"
    """Start reducing and scattering the chunk's gradients over data-parallel ranks."""

    # Members are singletons, so identity is equality; Enum's own hash is a Python call, and checkers hash millions.
    __hash__ = object.__hash__


COMPUTES = frozenset({ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT})
"""What takes time on a stage."""

MICROBATCH_ENDS = frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT})
"""After these a microbatch has left nothing on its chunk: activations are released, gradients are in their sums."""

MESSAGES_OF = {
    ActionKind.FORWARD: (ActionKind.RECV_FORWARD, ActionKind.SEND_FORWARD),
    ActionKind.BACKWARD: (ActionKind.RECV_BACKWARD, ActionKind.SEND_BACKWARD),
    ActionKind.BACKWARD_INPUT: (ActionKind.RECV_BACKWARD, ActionKind.SEND_BACKWARD),
}
"""What a compute receives before and sends after. BACKWARD_WEIGHT does neither."""


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a stage's list. `chunk` counts on the stage; GATHER and REDUCE have microbatch -1."""

    kind: ActionKind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        if self.microbatch < 0:
            return f"{self.kind.name}(chunk={self.chunk})"
        return f"{self.kind.name}(chunk={self.chunk}, microbatch={self.microbatch})"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The action lists of all stages: stages[pp_rank] is what that stage executes in one step."""

    name: str
    placement: Placement
    num_microbatches: int
    stages: tuple[tuple[Action, ...], ...]

    def lead(self, stage: int) -> tuple[Action, ...]:
        """Return the gathers that begin the stage's list: they need nothing of the batch.

        They may start as soon as the parameters are updated, while the batch is still being fetched.
        """
        return tuple(takewhile(lambda action: action.kind is ActionKind.GATHER, self.stages[stage]))

    @property
    def pp_size(self) -> int:
        return self.placement.pp_size

    @property
    def num_chunks(self) -> int:
        return self.placement.num_chunks
