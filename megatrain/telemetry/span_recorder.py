"""Spans: the operations of a rank, with their starts and durations. A span is written when it BEGINS.

A record stays open in the black box while its span lasts, so a rank that hangs or dies leaves the name of its current
operation. The end of a span stores its duration. A span on the host's clock takes no lock and costs one to two
microseconds (benchmarks/span_overhead.py). A DeviceTimer (timers.py) times device operations; without one, the host's
clock is used for them too.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import count, pairwise
from time import monotonic_ns
from types import TracebackType
from typing import TYPE_CHECKING

from megatrain.contracts.black_box.encoding import (
    GROUP_BYTES,
    GROUP_ENTERED_WORD,
    GROUP_LEFT_WORD,
    GROUPS_OFFSET,
    MAX_GROUPS,
    NO_VALUE,
    RECORD_BODY,
    RECORD_WORDS,
    RING_OFFSET,
    Word,
)
from megatrain.contracts.black_box.operations import MAX_OPERATIONS, Operation
from megatrain.contracts.black_box.values import RecordFlag, attended_bits
from megatrain.telemetry.black_box_writer import BlackBoxWriter
from megatrain.telemetry.device_spans import DEVICE_POSITION, DeviceSpans, OpenSpan
from megatrain.telemetry.step_summary import TotalsBuilder

if TYPE_CHECKING:
    from megatrain.telemetry.timers import DeviceTimer, DeviceTimes

_LOW_32 = 2**32 - 1
_RING_WORD = RING_OFFSET // 8
_FOLD_EVERY = 4096
_FLAGS_SHIFT = 16
"""The position of the flags in a record's last word: group, flags, check."""
# Plain ints and tables, because arithmetic on enum members would cost as much as the rest of a span.
_CURSOR_WORD = int(Word.CURSOR)
_LOST_WORD = int(Word.NUM_LOST_ENDS)
_AWAITED_WORD = int(Word.AWAITED)
_GROUP_WORDS = [(GROUPS_OFFSET + group * GROUP_BYTES) // 8 for group in range(MAX_GROUPS)]
_ENTERED_WORDS = [word + GROUP_ENTERED_WORD for word in _GROUP_WORDS]
_WATCHED = int(RecordFlag.WATCHED)
_LEFT_WORDS = [word + GROUP_LEFT_WORD for word in _GROUP_WORDS]


class Span:
    """A span that is open from the call that makes it to the end of its `with` block."""

    __slots__ = ("_recorder", "_token")

    def __init__(self, recorder: SpanRecorder, token: int) -> None:
        self._recorder = recorder
        self._token = token

    def __enter__(self) -> Span:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._recorder.end(self._token, kind is not None)


class SpanRecorder:
    """Records the spans of one rank. Several threads may record at the same time."""

    def __init__(self, writer: BlackBoxWriter, timer: DeviceTimer | None = None) -> None:
        self._writer = writer
        self._words = writer.words
        self._buffer = writer.buffer
        self._capacity = writer.capacity
        self._pack = RECORD_BODY.pack_into
        self._next_sequence = count(1).__next__
        self._next_untimed = count(-1, -1).__next__
        self._step = -1
        self._is_timed = [True] * MAX_OPERATIONS
        """Whether spans of an operation are recorded, by operation number."""
        self._initial_flags = [0] * MAX_OPERATIONS
        if timer is not None:
            for operation in Operation:
                self._initial_flags[operation.number] = int(RecordFlag.DEVICE_CLOCK) if operation.is_on_device else 0
        self._entered = [0] * MAX_GROUPS
        self._open: dict[int, OpenSpan] = {}
        """By token, without spans of device work that is launched and has not ended."""
        self._launched: dict[int, int] = {}
        """token -> how long the host took to launch the operation."""
        self._awaited: dict[int, int] = {}
        """token -> the time at which the host began to wait for the end."""
        self._untimed: dict[int, tuple[int, int]] = {}
        """token -> group, collective_sequence, for spans that are switched off."""
        self._totals = TotalsBuilder()
        self._add_ended = self._totals.ended.append
        self._changing_flags = threading.Lock()
        self._device: DeviceSpans | None = None
        if timer is not None:
            self._device = DeviceSpans(timer, writer.words, self._open, self._change_flags, self._end_on_device)

    def add_group(self, name: str, ranks: Sequence[int]) -> int:
        """Add a process group of this rank and return its number for `span(group=...)`.

        A pipeline link is one group per direction, with sender and receiver, so that both ranks have the same counts.
        Raises: DataError when there are more than 63 groups, or the name has more than 32 bytes.
        """
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        is_regular = stride != 0 and all(later - rank == stride for rank, later in pairwise(ranks))
        return self._writer.add_group(name, ranks[0], stride if is_regular else 0, len(ranks))

    def span(
        self,
        operation: Operation,
        *,
        step: int | None = None,
        microbatch: int = -1,
        chunk: int = -1,
        num_bytes: int = 0,
        group: int = 0,
    ) -> Span:
        """Open a span now. The end of the `with` block ends it; an exception marks it as failed.

        Units: `num_bytes` is what this rank sends or receives; `group` is a number from `add_group`.
        """
        return Span(self, self.begin(operation, step, microbatch, chunk, num_bytes, group))

    def begin(
        self,
        operation: Operation,
        step: int | None = None,
        microbatch: int = -1,
        chunk: int = -1,
        num_bytes: int = 0,
        group: int = 0,
        *,
        is_watched: bool = False,
    ) -> int:
        """Open a span that other code ends, such as the wait of an asynchronous collective, and return its token.

        is_watched: a dedicated thread ends it (RecordFlag.WATCHED).
        """
        number = operation.number
        if not self._is_timed[number]:
            return self._enter(group) if group else 0
        words = self._words
        collective_sequence = 0
        if group:
            collective_sequence = self._entered[group] + 1
            self._entered[group] = collective_sequence
            words[_ENTERED_WORDS[group]] = collective_sequence
        flags = _WATCHED if is_watched else self._initial_flags[number]
        start = monotonic_ns()
        token = self._next_sequence()
        word = _RING_WORD + token % self._capacity * RECORD_WORDS
        # The order of these stores is the protocol. Readers follow the cursor and reject a slot whose sequence number
        # is 0 or changes during the read. The number is stored last, when the rest of the record is complete.
        words[_CURSOR_WORD] = token
        words[word] = 0
        self._pack(
            self._buffer, word * 8 + 8, start, NO_VALUE, start, num_bytes, self._step if step is None else step,
            collective_sequence & _LOW_32, microbatch, chunk, number, group, flags, token & _LOW_32,
        )  # fmt: skip
        words[word] = token
        self._open[token] = (start, number, num_bytes, group, collective_sequence, word)
        if flags and not is_watched and self._device is not None:
            self._device.start(token, number, group)
        return token

    def begin_now(self, token: int) -> None:
        """Record that the operation of this span begins only now, after it has waited for its turn since `begin`."""
        span = self._open.get(token)
        if span is not None:
            _, number, num_bytes, group, collective_sequence, word = span
            now = monotonic_ns()
            self._open[token] = (now, number, num_bytes, group, collective_sequence, word)
            if self._words[word] == token:
                self._words[word + 1] = now

    def launched(self, token: int) -> None:
        """Record that the thread of the step loop has launched the operation of this span and now does other work.

        With a device timer, the span of a device operation ends when the current stream reaches this point.
        """
        span = self._open.get(token)
        if span is not None and self._device is not None and self._initial_flags[span[1]]:
            self.end(token)
        elif span is not None:
            self._launched[token] = monotonic_ns() - span[0]

    def await_end(self, token: int) -> None:
        """Record that the host waits from now on until the group operation of this span has ended.

        An operation that was started but is not waited for delays no other rank. This separates the culprits of a hang
        from its victims, and overlapped communication from exposed communication.
        """
        on_device = None if self._device is None else self._device.get(token)
        span = self._open.get(token)
        counted = span or on_device
        group, collective_sequence = counted[3:5] if counted is not None else self._untimed.get(token, (0, 0))
        if group:
            self._words[_AWAITED_WORD] = collective_sequence * MAX_GROUPS + group
        if self._device is not None and on_device is not None:
            self._device.wait(token)
        elif span is not None:
            self._awaited[token] = monotonic_ns()
            if token not in self._open:  # another thread has ended the span before this entry existed
                self._awaited.pop(token, None)

    def end(self, token: int, has_failed: bool = False) -> None:
        """Close a span. Ignores the token 0, and a token whose span has already ended."""
        now = monotonic_ns()
        span = self._open.pop(token, None)
        if span is None:
            untimed = self._untimed.pop(token, None)
            if untimed is not None:
                self._leave(*untimed)
            return
        start, number, num_bytes, group, collective_sequence, word = span
        attended = self._attended(token, start, now) if group else -1
        if has_failed:
            self._change_flags(token, word, RecordFlag.FAILED)
        if self._device is not None and self._initial_flags[number]:
            self._change_flags(token, word, RecordFlag.HOST_DONE)
            if self._device.launched(token, span):
                return
            # the device is too far behind to be timed: on the host's clock the span lasted at least until now
            self._change_flags(token, word, RecordFlag.NONE, RecordFlag.HOST_DONE | RecordFlag.DEVICE_CLOCK)
            attended = -1  # the host does not wait for the device
        if self._words[word] == token:
            if attended >= 0:
                self._words[word + RECORD_WORDS - 1] |= attended_bits(attended, now - start) << _FLAGS_SHIFT
            self._words[word + 2] = now - start
        else:  # the ring has wrapped since, and another span has the slot
            self._words[_LOST_WORD] += 1
        if group:
            self._leave(group, collective_sequence)
        self._add_ended((number, now - start, num_bytes, attended))
        if len(self._totals.ended) > _FOLD_EVERY:
            self._totals.fold()

    def _attended(self, token: int, start: int, end: int) -> int:
        """Return the part of a span, in ns, in which the host only launched the operation or waited for it."""
        attended = self._launched.pop(token, 0)
        since = self._awaited.pop(token, 0)
        return attended + end - max(since, start) if since else attended

    def _enter(self, group: int) -> int:
        """Count a span of a group whose operation is switched off. Ranks apply a new mask at different steps, but their
        counts must agree."""
        collective_sequence = self._entered[group] + 1
        self._entered[group] = collective_sequence
        self._words[_ENTERED_WORDS[group]] = collective_sequence
        token = self._next_untimed()
        self._untimed[token] = (group, collective_sequence)
        return token

    def _change_flags(self, token: int, word: int, added: RecordFlag, removed: RecordFlag = RecordFlag.NONE) -> None:
        words, at = self._words, word + RECORD_WORDS - 1
        with self._changing_flags:
            if words[word] == token:
                words[at] = words[at] & ~(int(removed) << _FLAGS_SHIFT) | int(added) << _FLAGS_SHIFT

    def _leave(self, group: int, collective_sequence: int) -> None:
        word = _LEFT_WORDS[group]
        if collective_sequence > self._words[word]:  # the host may wait for asynchronous collectives in another order
            self._words[word] = collective_sequence

    def _end_on_device(self, span: OpenSpan, times: DeviceTimes) -> None:
        _, number, num_bytes, group, collective_sequence, word = span
        words, awaited_ns = self._words, times.awaited_ns if group else -1
        if words[word] == times.token:
            words[word + 1] = times.start_ns
            words[word + 2] = times.duration_ns
            share = RecordFlag(attended_bits(awaited_ns, times.duration_ns) if group else 0)
            self._change_flags(times.token, word, share, DEVICE_POSITION)
        else:
            words[_LOST_WORD] += 1
        if group:
            self._leave(group, collective_sequence)
        self._add_ended((number, times.duration_ns, num_bytes, awaited_ns))
        if len(self._totals.ended) > _FOLD_EVERY:
            self._totals.fold()

    def follow_device(self) -> None:
        """Start a thread that records the device's progress even while the step loop is stuck."""
        if self._device is not None:
            self._device.start_following()

    def _write(self, *fields: int) -> None:
        """Write a complete record; `fields` are those of RECORD_BODY except the last."""
        sequence = self._next_sequence()
        word = _RING_WORD + sequence % self._capacity * RECORD_WORDS
        self._words[_CURSOR_WORD] = sequence
        self._words[word] = 0
        self._pack(self._buffer, word * 8 + 8, *fields, sequence & _LOW_32)
        self._words[word] = sequence
