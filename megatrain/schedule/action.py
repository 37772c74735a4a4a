"""The vocabulary of a pipeline schedule: actions, and each stage's list of actions.

A stage executes its list in order. Computes first wait for their inputs. The other actions start an exchange and
return; without `parallel.overlap`, GATHER and REDUCE wait for it too. A backward is one compute, or two if the schedule
splits it. chunk_placement.py defines which stage has which part of the model. Messages from one stage to another in one
direction form a channel, first in, first out: the n-th receive gets the message of the n-th send.
Source: the list-of-actions form of torch.distributed.pipelining and DeepSpeed, with other semantics.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

from megatrain.schedule.chunk_placement import ChunkPlacement


class ActionKind(Enum):
    """What a stage does in one action."""

    FORWARD = "forward"
    """Wait for the input and for the chunk's parameters, then compute."""
    BACKWARD = "backward"
    """Wait for the output's gradient, then compute the gradients of input and weights."""
    DGRAD = "dgrad"
    """Wait for the output's gradient, then compute the input's gradient, and defer the wgrads."""
    WGRAD = "wgrad"
    """Run the wgrads that this micro-batch's DGRAD deferred."""
    SEND_FORWARD = "send_forward"
    """Post the output of this chunk to the next model chunk; the buffer is released on delivery."""
    RECV_FORWARD = "recv_forward"
    """Post the receive of this chunk's input."""
    SEND_BACKWARD = "send_backward"
    """Post the gradient of this chunk's input to the previous model chunk."""
    RECV_BACKWARD = "recv_backward"
    """Post the receive of the gradient of this chunk's output."""
    GATHER = "gather"
    """Start gathering the chunk's parameters over data-parallel ranks, unless they are already gathered."""
    REDUCE = "reduce"
    """Start reducing and scattering the chunk's gradients over data-parallel ranks."""

    # Members are singletons, so identity is equality. Enum's own hash is a Python call, and checkers hash millions of
    # members.
    __hash__ = object.__hash__


COMPUTES = frozenset({ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.DGRAD, ActionKind.WGRAD})
"""The actions that take time on a stage."""

MICROBATCH_ENDS = frozenset({ActionKind.BACKWARD, ActionKind.WGRAD})
"""After these, a chunk keeps no data of the micro-batch: activations are released, and gradients are in main_grad."""

MESSAGES_OF = {
    ActionKind.FORWARD: (ActionKind.RECV_FORWARD, ActionKind.SEND_FORWARD),
    ActionKind.BACKWARD: (ActionKind.RECV_BACKWARD, ActionKind.SEND_BACKWARD),
    ActionKind.DGRAD: (ActionKind.RECV_BACKWARD, ActionKind.SEND_BACKWARD),
}
"""The receive before each compute and the send after it. WGRAD has no messages."""


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a stage's list. `chunk` is the number on the stage; GATHER and REDUCE have micro-batch -1."""

    kind: ActionKind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        if self.microbatch < 0:
            return f"{self.kind.name}(chunk={self.chunk})"
        return f"{self.kind.name}(chunk={self.chunk}, microbatch={self.microbatch})"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The action lists of all stages: the stage pp_rank executes stages[pp_rank] in one step."""

    name: str
    placement: ChunkPlacement
    num_microbatches: int
    stages: tuple[tuple[Action, ...], ...]

    def initial_gathers(self, stage: int) -> tuple[Action, ...]:
        """Return the gathers at the start of the stage's list, which do not need the batch.

        They may start as soon as the parameters are updated, while the batch is still being fetched.
        """
        return tuple(takewhile(lambda action: action.kind is ActionKind.GATHER, self.stages[stage]))

    @property
    def pp_size(self) -> int:
        return self.placement.pp_size

    @property
    def num_chunks(self) -> int:
        return self.placement.num_chunks
