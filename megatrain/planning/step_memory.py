"""A stage's memory over one training step: a walk along the action list counts what each action holds and frees.

The walk takes the micro-batches in flight of each chunk from the schedule itself, because the chunk with the embedding
or the head keeps other amounts than the other chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.config.config import Config
from megatrain.planning.footprint import Footprint
from megatrain.schedule import Action, ActionKind

_RECEIVES = (ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD)
_SENDS = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
_BACKWARDS = (ActionKind.BACKWARD, ActionKind.DGRAD)


@dataclass(frozen=True, slots=True)
class ChunkMemory:
    """The memory of one chunk: a micro-batch's footprint, and bytes of its gradients."""

    footprint: Footprint
    whole_gradients: int
    """All gradients, in the dtype in which they accumulate."""
    traveling: int
    """Copies, and gradients that are freed at the end of the reduction: alive from its start to its end."""
    exchanged: int
    """Parts received from other ranks on CPUs, where chunks take turns: only one chunk has them at a time."""
    summed: int
    """The sum of the received parts, which exists for a moment if half precision is summed."""
    copied: int
    """The peak in addition to the copies while one bucket after another is copied, if gradients are sent in another
    dtype and then freed."""
    borrowed_gradients: int = 0
    """Gradients of the stage's first chunk that this chunk's backward writes too (a tied head), in the dtype in which
    they accumulate. ZeRO-2 holds them until the first chunk's backward, which counts them as its own."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes alive at one moment of a step, without parameters, gradients and optimizer state."""

    what: str
    activations: int = 0
    working: int = 0
    messages: int = 0
    traveling: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.working + self.messages + self.traveling


class StepWalk:
    """Counts memory along the actions of one stage."""

    def __init__(self, config: Config, stage: int, chunks: Sequence[ChunkMemory], message: int) -> None:
        """message: bytes of the tensor that a chunk passes to the next chunk."""
        self._chunks = chunks
        self._message = message
        self._is_zero_2 = config.parallel.zero_stage == 2
        self._has_overlap = config.parallel.overlap
        self._is_only_stage = config.parallel.pp_size == 1
        self._activations = 0
        self._newest: dict[int, int] = {}
        """For each chunk, the micro-batch of its last forward, while it is in flight."""
        self._messages = 0
        self._traveling: dict[int, int] = {}
        self._exchanged: dict[int, int] = {}
        self._borrowed = 0
        """Gradients of the first chunk that exist before its backward."""
        self._outgoing = 0
        self._remaining: Counter[tuple[ActionKind, int]] = Counter()
        """The number of actions still to come, by kind and chunk."""
        self._receives: set[tuple[ActionKind, int, int]] = set()
        self._on_host = 0
        self.peak = Moment("start")
        self.peak_on_host = 0
        """The peak of activations that wait in host memory, in bytes."""

    def run(self, actions: Sequence[Action]) -> Moment:
        """Return the peak of forward and backward."""
        sent = {(a.kind, a.chunk, a.microbatch) for a in actions if a.kind in _SENDS}
        self._remaining = Counter((a.kind, a.chunk) for a in actions)
        for action in actions:
            self._remaining[action.kind, action.chunk] -= 1
            if action.kind in _RECEIVES and not self._is_only_stage:
                self._hold_message((action.kind, action.chunk, action.microbatch))
            elif action.kind is ActionKind.FORWARD:
                self._forward(action, (ActionKind.SEND_FORWARD, action.chunk, action.microbatch) in sent)
            elif action.kind in _BACKWARDS:
                self._backward(action, (ActionKind.SEND_BACKWARD, action.chunk, action.microbatch) in sent)
            elif action.kind is ActionKind.WGRAD:
                self._backward_weight(action)
            elif action.kind is ActionKind.REDUCE and not self._is_zero_2:
                self._start_reduction(action.chunk)
        for chunk in list(self._traveling):
            self._finish_reduction(chunk)
        return self.peak

    def _forward(self, action: Action, is_sent: bool) -> None:
        footprint, chunk = self._chunks[action.chunk].footprint, action.chunk
        self._consume_message(ActionKind.RECV_FORWARD, action)
        is_after_newest = chunk in self._newest
        self._record_moment(
            f"forward of chunk {chunk}", footprint.forward_after_newest if is_after_newest else footprint.forward
        )
        self._activations += footprint.kept + (0 if is_after_newest else footprint.kept_of_newest)
        self._newest[chunk] = action.microbatch
        self._on_host += footprint.on_host
        self.peak_on_host = max(self.peak_on_host, self._on_host)
        if is_sent and self._is_only_stage:
            self._hold_message((ActionKind.RECV_FORWARD, chunk + 1, action.microbatch))
            return
        self._finish_compute(is_sent)

    def _backward(self, action: Action, is_sent: bool) -> None:
        chunk = self._chunks[action.chunk]
        self._consume_message(ActionKind.RECV_BACKWARD, action)
        if self._is_zero_2:
            for earlier in list(self._traveling):
                self._finish_reduction(earlier)
            self._traveling[action.chunk] = chunk.whole_gradients
            if action.chunk == 0:
                self._borrowed = 0
            self._borrowed = max(self._borrowed, chunk.borrowed_gradients)
        footprint, what = chunk.footprint, f"backward of chunk {action.chunk}"
        kept, most = footprint.kept, footprint.backward
        if self._newest.get(action.chunk) == action.microbatch:
            del self._newest[action.chunk]
            kept, most = kept + footprint.kept_of_newest, footprint.backward_of_newest
        self._activations -= kept
        self._on_host -= footprint.on_host
        is_reduced = self._is_zero_2 or self._is_last(action)
        self._record_moment(what, most, of_which_kept=kept, early=footprint.early if is_reduced else 0)
        self._activations += footprint.deferred
        if self._is_zero_2:
            self._start_reduction(action.chunk)
        if is_sent and self._is_only_stage:
            self._hold_message((ActionKind.RECV_BACKWARD, action.chunk - 1, action.microbatch))
            return
        self._finish_compute(is_sent)

    def _backward_weight(self, action: Action) -> None:
        footprint = self._chunks[action.chunk].footprint
        early = footprint.early_weights if self._is_last(action) else 0
        self._record_moment(f"weights' gradients of chunk {action.chunk}", footprint.weights, early=early)
        self._activations -= footprint.deferred
        self._finish_compute(False)

    def _is_last(self, action: Action) -> bool:
        """Return whether the action is the last of its kind for its chunk."""
        return not self._remaining[action.kind, action.chunk]

    def _hold_message(self, key: tuple[ActionKind, int, int]) -> None:
        """Count a message that waits for its consumer: from its receive on, or in a single stage from its send on."""
        self._receives.add(key)
        self._messages += self._message

    def _consume_message(self, kind: ActionKind, action: Action) -> None:
        """Stop counting a received tensor as a message: its consumer counts it from here on."""
        key = (kind, action.chunk, action.microbatch)
        if key in self._receives:
            self._receives.remove(key)
            self._messages -= self._message

    def _finish_compute(self, is_sent: bool) -> None:
        """Count the result as a message. The previous message has arrived by the end of this computation."""
        self._messages -= self._outgoing
        self._outgoing = self._message if is_sent else 0
        self._messages += self._outgoing

    def _start_reduction(self, chunk: int) -> None:
        """Start a reduction. If gradients are sent in another dtype, both copies are alive for a moment."""
        memory = self._chunks[chunk]
        self._record_moment(f"reduction of chunk {chunk}", memory.copied)
        self._traveling[chunk], self._exchanged[chunk] = memory.traveling, memory.exchanged
        self._record_moment(f"reduction of chunk {chunk}", 0)
        if not self._has_overlap:
            self._finish_reduction(chunk)

    def _finish_reduction(self, chunk: int) -> None:
        self._record_moment(f"reduction of chunk {chunk}", self._chunks[chunk].summed)
        self._traveling.pop(chunk, None)
        self._exchanged.pop(chunk, None)

    def _record_moment(self, what: str, bytes_of_part: int, of_which_kept: int = 0, early: int = 0) -> None:
        """Record a moment if it is the largest. early: bytes of gradients that are reduced during the action."""
        moment = Moment(
            what,
            self._activations + of_which_kept,
            bytes_of_part - of_which_kept,
            self._messages,
            sum(self._traveling.values()) + self._borrowed + max(self._exchanged.values(), default=0) + early,
        )
        if moment.total > self.peak.total:
            self.peak = moment
