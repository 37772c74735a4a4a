"""Spans: what the rank does, when it began and how long it took. The one idea: a span is written when it BEGINS.

A record lies open in the black box while its span lasts, so a rank that hangs or dies leaves the name of what it was
doing: in every step, because it is unknown which one will hang; the streamer decides which steps are streamed.
Ending a span stores one word. Durations are also summed by operation, for the step line and for the rows that are
streamed for every step. The hot path takes no lock and costs one to two microseconds (benchmarks/span_overhead.py).
Device operations are timed by the accelerator where there is a DeviceTimer (timers.py), else by the host's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path
from time import monotonic_ns
from types import TracebackType
from typing import TYPE_CHECKING

from megatrain.contracts.black_box_layout import (
    GROUP_BYTES,
    GROUP_ENTERED_WORD,
    GROUP_LEFT_WORD,
    GROUPS_OFFSET,
    MAX_GROUPS,
    NOT_SAID,
    RECORD_BODY,
    RECORD_WORDS,
    RING_OFFSET,
    Word,
    decode_progress,
    value_bits,
)
from megatrain.contracts.black_box_values import (
    ALL_OPERATIONS,
    ControlPage,
    Identity,
    Phase,
    Progress,
    RecordFlag,
    attended_bits,
)
from megatrain.contracts.operations import MAX_OPERATIONS, Operation
from megatrain.contracts.step_values import StepValue
from megatrain.telemetry.black_box_writer import BlackBoxWriter, open_writer
from megatrain.telemetry.step_summary import OperationTotals, StepSummary, TotalsBuilder

if TYPE_CHECKING:
    from megatrain.telemetry.timers import DeviceTimer

_NS = 1_000_000_000
_LOW_32 = 2**32 - 1
_FOLD_EVERY = 4096
_FOLD_MASK = _FOLD_EVERY - 1
_MAX_TOTALS = 16
"""Rows streamed for a rank and step, at most."""
_STEPS_REMEMBERED = 31
"""The median of this many steps is the typical step: odd, and soon used to a new speed."""
_FLAGS_SHIFT = 16
"""Place of the flags in a record's last word: group, flags, check."""
_RING_WORD = RING_OFFSET // 8
# Plain ints and tables: arithmetic on enum members would cost as much as the rest of a span.
_CURSOR_WORD = int(Word.CURSOR)
_LOST_WORD = int(Word.NUM_LOST_ENDS)
_AWAITED_WORD = int(Word.AWAITED)
_GROUP_WORDS = [(GROUPS_OFFSET + group * GROUP_BYTES) // 8 for group in range(MAX_GROUPS)]
_ENTERED_WORDS = [word + GROUP_ENTERED_WORD for word in _GROUP_WORDS]
_LONGEST_WORDS = {
    Phase.CHECKPOINT: int(Word.LONGEST_CHECKPOINT_NS),
    Phase.EVALUATION: int(Word.LONGEST_EVALUATION_NS),
}
_WATCHED = int(RecordFlag.WATCHED)
_LEFT_WORDS = [word + GROUP_LEFT_WORD for word in _GROUP_WORDS]


class Span:
    """A span that is open from the call that made it to the end of its `with` block."""

    __slots__ = ("_recorder", "_token")

    def __init__(self, recorder: Recorder, token: int) -> None:
        self._recorder = recorder
        self._token = token

    def __enter__(self) -> Span:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._recorder.end(self._token, kind is not None)


class Recorder:
    """Records the spans and the progress of one rank. Made by `open_recorder`, passed to whoever measures.

    Threads may record beside each other; steps and phases belong to the thread that runs the step loop.
    """

    def __init__(self, writer: BlackBoxWriter, timer: DeviceTimer | None = None) -> None:
        self.control = ControlPage()
        """The control page as of the last `set_step` or `read_control`."""
        self._writer = writer
        self._timer = timer
        self._words = writer.words
        self._buffer = writer.buffer
        self._capacity = writer.capacity
        self._pack = RECORD_BODY.pack_into
        self._next_sequence = count(1).__next__
        self._next_untimed = count(-1, -1).__next__
        self._step = -1
        self._is_timed = [True] * MAX_OPERATIONS
        """By operation number."""
        self._mask = ALL_OPERATIONS
        self._initial_flags = [0] * MAX_OPERATIONS
        if timer is not None:
            for operation in Operation:
                self._initial_flags[operation.number] = int(RecordFlag.DEVICE_CLOCK) if operation.is_on_device else 0
        self._entered = [0] * MAX_GROUPS
        # token -> start, operation number, bytes, group, place in the group's order, word of the record
        self._open: dict[int, tuple[int, int, int, int, int, int]] = {}
        self._launched: dict[int, int] = {}
        """token -> how long the host took to launch it."""
        self._awaited: dict[int, int] = {}
        """token -> since when the host waits for its end."""
        self._untimed: dict[int, tuple[int, int]] = {}
        """token -> group, place in the group's order, of spans that are switched off."""
        self._totals = TotalsBuilder()
        self._note_ended = self._totals.ended.append
        self._step_started_ns = monotonic_ns()
        self._phase = Phase.INIT
        self._phase_began_ns = self._step_started_ns
        self._durations: deque[int] = deque(maxlen=_STEPS_REMEMBERED)
        self._summary: StepSummary | None = None

    def add_group(self, name: str, ranks: Sequence[int]) -> int:
        """Enter a process group of this rank and return its number for `span(group=...)`.

        For a pipeline link enter one group a direction, of sender and receiver: then both ends count alike.
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
        """Open a span now, to be ended by leaving the `with` block; an exception marks it as failed.

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
        """Open a span that something else will end, as the wait of an asynchronous collective: return its token.

        is_watched: a thread that does nothing else ends it (RecordFlag.WATCHED).
        """
        number = operation.number
        if not self._is_timed[number]:
            return self._enter(group) if group else 0
        words = self._words
        place = 0
        if group:
            place = self._entered[group] + 1
            self._entered[group] = place
            words[_ENTERED_WORDS[group]] = place
        flags = _WATCHED if is_watched else self._initial_flags[number]
        start = monotonic_ns()
        token = self._next_sequence()
        word = _RING_WORD + token % self._capacity * RECORD_WORDS
        # The order of these stores is the protocol: readers go by the cursor, distrust a slot whose sequence number
        # is 0 or changes under them, and the number comes back when the rest is whole.
        words[_CURSOR_WORD] = token
        words[word] = 0
        self._pack(
            self._buffer,
            word * 8 + 8,
            start,
            NOT_SAID,
            start,
            num_bytes,
            self._step if step is None else step,
            place & _LOW_32,
            microbatch,
            chunk,
            number,
            group,
            flags,
            token & _LOW_32,
        )
        words[word] = token
        self._open[token] = (start, number, num_bytes, group, place, word)
        if flags and not is_watched and self._timer is not None:
            self._timer.start(token, number)
        return token

    def begin_now(self, token: int) -> None:
        """Say that what this span stands for begins only now: it waited for its turn since `begin`."""
        span = self._open.get(token)
        if span is not None:
            _, number, num_bytes, group, place, word = span
            now = monotonic_ns()
            self._open[token] = (now, number, num_bytes, group, place, word)
            if self._words[word] == token:
                self._words[word + 1] = now

    def launched(self, token: int) -> None:
        """Say that the thread of the step loop has launched what this span stands for and turns to something else."""
        span = self._open.get(token)
        if span is not None:
            self._launched[token] = monotonic_ns() - span[0]

    def await_end(self, token: int) -> None:
        """Say that the host waits from now on for the operation of a group whose span this is, until it has ended.

        An operation that was started and is not waited for holds up no other rank: this separates a hang's culprits
        from its victims, and communication that compute hides from communication that keeps a rank waiting.
        """
        span = self._open.get(token)
        group, place = (span[3], span[4]) if span is not None else self._untimed.get(token, (0, 0))
        if group:
            self._words[_AWAITED_WORD] = place * MAX_GROUPS + group
        if span is not None:
            self._awaited[token] = monotonic_ns()
            if token not in self._open:  # another thread has ended it just now, and looked for this before it was there
                self._awaited.pop(token, None)

    def end(self, token: int, has_failed: bool = False) -> None:
        """Close a span. A token that is 0, or was ended before, is ignored."""
        now = monotonic_ns()
        span = self._open.pop(token, None)
        if span is None:
            untimed = self._untimed.pop(token, None)
            if untimed is not None:
                self._leave(*untimed)
            return
        start, number, num_bytes, group, place, word = span
        attended = self._attended(token, start, now) if group else -1
        if has_failed:
            self._set_flag(token, word, RecordFlag.FAILED)
        if self._timer is not None and self._initial_flags[number]:
            self._set_flag(token, word, RecordFlag.HOST_DONE)
            self._open[token] = span
            if self._timer.stop(token):
                self._resolve(number)
                return
            # the device is too far behind: by the host's clock the span took at least until now
            self._open.pop(token)
            self._clear_flag(token, word, RecordFlag.HOST_DONE | RecordFlag.DEVICE_CLOCK)
            attended = -1  # the host waits for no device
        if self._words[word] == token:
            if attended >= 0:
                self._words[word + RECORD_WORDS - 1] |= attended_bits(attended, now - start) << _FLAGS_SHIFT
            self._words[word + 2] = now - start
        else:  # so long ago that the ring has come round and another span lies there
            self._words[_LOST_WORD] += 1
        if group:
            self._leave(group, place)
        self._note_ended((number, now - start, num_bytes, attended))
        if not token & _FOLD_MASK:
            self._totals.fold()

    def _attended(self, token: int, start: int, end: int) -> int:
        """Return for how much of a span the host did nothing but launch it and wait for it."""
        attended = self._launched.pop(token, 0)
        since = self._awaited.pop(token, 0)
        return attended + end - max(since, start) if since else attended

    def _enter(self, group: int) -> int:
        """Count a span of a group that is switched off: ranks obey a switch some steps apart, and must yet agree."""
        place = self._entered[group] + 1
        self._entered[group] = place
        self._words[_ENTERED_WORDS[group]] = place
        token = self._next_untimed()
        self._untimed[token] = (group, place)
        return token

    def _set_flag(self, token: int, word: int, flag: RecordFlag) -> None:
        if self._words[word] == token:
            self._words[word + RECORD_WORDS - 1] |= int(flag) << _FLAGS_SHIFT

    def _clear_flag(self, token: int, word: int, flag: RecordFlag) -> None:
        if self._words[word] == token:
            self._words[word + RECORD_WORDS - 1] &= ~(int(flag) << _FLAGS_SHIFT)

    def _leave(self, group: int, place: int) -> None:
        word = _LEFT_WORDS[group]
        if place > self._words[word]:  # asynchronous collectives may be waited for in another order
            self._words[word] = place

    def _resolve(self, lane: int | None = None) -> None:
        """Write down what the device has finished; never waits for it."""
        if self._timer is None:
            return
        words = self._words
        for token, start_ns, duration_ns in self._timer.resolved(lane):
            _, number, num_bytes, group, place, word = self._open.pop(token)
            if words[word] == token:
                words[word + 1] = start_ns
                words[word + 2] = duration_ns
            else:
                words[_LOST_WORD] += 1
            if group:
                self._leave(group, place)
            self._note_ended((number, duration_ns, num_bytes, -1))
        if len(self._totals.ended) > _FOLD_EVERY:
            self._totals.fold()

    def set_step(self, step: int) -> None:
        """Begin a step: spans without a step of their own belong to it. Obeys a changed control page."""
        words = self._words
        self._step = step
        self._step_started_ns = monotonic_ns()
        words[Word.STEP_STARTED_NS] = self._step_started_ns
        words[Word.CURRENT_STEP] = step
        self.set_phase(Phase.STEP if self._summary else Phase.FIRST_STEP)
        control = self.read_control()
        if control.span_mask != self._mask:
            self._mask = control.span_mask
            self._is_timed = [bool(self._mask >> number & 1) for number in range(MAX_OPERATIONS)]
        self._resolve()

    def complete_step(self) -> StepSummary:
        """End the step: the proof of life that watchers go by. Writes the step's totals to the black box.

        Call it when the optimizer has stepped, before evaluation and checkpoints, so that these do not count as step
        time. A first step is not learned from.
        """
        now = monotonic_ns()
        self._resolve()
        duration = now - self._step_started_ns
        words = self._words
        words[Word.LAST_STEP_NS] = duration
        if self._summary is not None:
            self._durations.append(duration)
            words[Word.MEDIAN_STEP_NS] = sorted(self._durations)[len(self._durations) // 2]
        words[Word.COMPLETED_NS] = now
        words[Word.COMPLETED_STEP] = self._step
        self._summary = StepSummary(self._step, self._step_started_ns, duration, self._totals.take())
        if self._mask:
            for operation, totals in list(self._summary.totals.items())[:_MAX_TOTALS]:
                self._write_total(operation.number, totals)
        return self._summary

    def note_value(self, kind: StepValue, value: float) -> None:
        """Write down a number that the step came to; nothing where everything is switched off."""
        if self._mask:
            now = monotonic_ns()
            self._write(now, value_bits(value), now, 0, self._step, 0, -1, -1, int(kind), 0, RecordFlag.VALUE)

    def step_summary(self) -> StepSummary | None:
        """Return what the last completed step was spent on; None before the first."""
        return self._summary

    def _write_total(self, number: int, totals: OperationTotals) -> None:
        self._write(
            *(self._step_started_ns, totals.sum_ns, totals.max_ns, totals.num_bytes, self._step, totals.count, -1, -1),
            *(number, 0, RecordFlag.STEP_TOTAL),
        )

    def _write(self, *fields: int) -> None:
        """Write a whole record at once; `fields` are those of RECORD_BODY but the last."""
        sequence = self._next_sequence()
        word = _RING_WORD + sequence % self._capacity * RECORD_WORDS
        self._words[_CURSOR_WORD] = sequence
        self._words[word] = 0
        self._pack(self._buffer, word * 8 + 8, *fields, sequence & _LOW_32)
        self._words[word] = sequence

    def set_phase(self, phase: Phase) -> None:
        """Say what the rank is busy with, so that a watcher knows how long to wait. `set_step` says the step phases."""
        if phase != self._phase:
            self._learn_phase()
            self._phase = phase
            # A watcher between these two stores sees the old phase as just begun, never the new one as old.
            self._phase_began_ns = monotonic_ns()
            self._words[Word.PHASE_SINCE_NS] = self._phase_began_ns
            self._words[Word.PHASE] = phase

    def _learn_phase(self) -> None:
        """Remember how long the phase took that ends now: the next one of its kind will not take many times as long."""
        words, word = self._words, _LONGEST_WORDS.get(self._phase)
        if word is not None and self._summary is not None:
            words[word] = max(words[word], monotonic_ns() - self._phase_began_ns)

    def progress(self) -> Progress:
        """Return how far this rank has come, as its black box tells others."""
        return decode_progress(self._words, "the own black box")

    def note_write(self, seconds: float) -> None:
        """Say how long a snapshot took from this host's memory to storage: the longest counts."""
        words = self._words
        words[Word.LONGEST_WRITE_NS] = max(words[Word.LONGEST_WRITE_NS], int(seconds * _NS))

    def set_save_interval(self, seconds: float) -> None:
        """Say how long it is now from one checkpoint that is taken by time to the next."""
        self._words[Word.SAVE_INTERVAL_NS] = int(seconds * _NS)

    def show_life(self) -> None:
        """Say that the rank lives while it waits for something outside the job, as storage."""
        self._words[Word.PHASE_SINCE_NS] = monotonic_ns()

    @property
    def path(self) -> Path | None:
        """Where the black box is; None where there is none."""
        return self._writer.path

    def read_control(self) -> ControlPage:
        """Return what the executor says now. Cheap when nothing has changed."""
        changed = self._writer.next_control()
        if changed is not None:
            self.control = changed
        return self.control

    def set_obeyed_command(self, number: int) -> None:
        """Tell the executor that the command of this number was carried out."""
        self._words[Word.OBEYED_COMMAND] = number

    def close(self, *, keep: bool = False, has_failed: bool = False) -> None:
        """Stop recording. The black box is removed unless it is to outlive the process: `keep` it after a failure."""
        self._resolve()
        self._is_timed = [False] * MAX_OPERATIONS
        self._writer.close(keep=keep, has_failed=has_failed)


def open_recorder(
    identity: Identity, *, directory: str, run_key: str, num_records: int, timer: DeviceTimer | None = None
) -> Recorder:
    """Return this rank's recorder with its black box in `directory` ("" for none). Never fails without one."""
    return Recorder(open_writer(identity, directory, run_key, num_records), timer)
