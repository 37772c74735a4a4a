"""The telemetry of a rank: its spans, and the progress, values and totals of its steps.

Every step is recorded, because it is unknown which step will hang; the streamer decides which steps are streamed.
Durations are also summed by operation, for the step line and for the rows that are streamed for every step.
"""

from __future__ import annotations

from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING

from megatrain.contracts.black_box.encoding import Word, decode_progress, value_bits
from megatrain.contracts.black_box.operations import MAX_OPERATIONS, Operation, StepValue
from megatrain.contracts.black_box.values import (
    ALL_OPERATIONS,
    ControlPage,
    Identity,
    Phase,
    Progress,
    RecordFlag,
)
from megatrain.telemetry.black_box_writer import BlackBoxWriter, open_writer
from megatrain.telemetry.span_recorder import SpanRecorder
from megatrain.telemetry.step_summary import OperationTotals, StepSummary, TypicalStep

if TYPE_CHECKING:
    from megatrain.telemetry.timers import DeviceTimer

_NS = 1_000_000_000
_MAX_TOTALS = 16
"""The most rows that are streamed per rank and step."""
_LONGEST_WORDS = {
    Phase.CHECKPOINT: int(Word.LONGEST_CHECKPOINT_NS),
    Phase.EVALUATION: int(Word.LONGEST_EVALUATION_NS),
}


class Recorder(SpanRecorder):
    """Records the spans and the progress of one rank. `open_recorder` creates it.

    Only the thread of the step loop sets steps and phases.
    """

    def __init__(self, writer: BlackBoxWriter, timer: DeviceTimer | None = None) -> None:
        super().__init__(writer, timer)
        self.control = ControlPage()
        """The control page at the last `set_step` or `read_control`."""
        self._mask = ALL_OPERATIONS
        self._step_started_ns = monotonic_ns()
        self._phase = Phase.INIT
        self._phase_began_ns = self._step_started_ns
        self._typical_step = TypicalStep()
        self._summary: StepSummary | None = None

    def set_step(self, step: int) -> None:
        """Begin a step, to which spans without an explicit step belong. Applies a changed control page."""
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
        if self._device is not None:
            self._device.resolve()

    def set_work(self, work: int) -> None:
        """State how much this step computes; see TypicalStep.set_work."""
        self._typical_step.set_work(work)
        self._words[Word.MEDIAN_STEP_NS] = self._typical_step.median_ns

    def complete_step(self) -> StepSummary:
        """End the step, which watchers read as the heartbeat of the rank. Writes the step's totals to the black box.

        Must be called after the optimizer step, before evaluation and checkpoints, so that these do not count as step
        time. The first step does not count towards the typical step.
        """
        now = monotonic_ns()
        if self._device is not None:
            self._device.resolve()
        duration, words = now - self._step_started_ns, self._words
        words[Word.LAST_STEP_NS] = duration
        if self._summary is not None:
            self._typical_step.add(duration)
            words[Word.MEDIAN_STEP_NS] = self._typical_step.median_ns
        words[Word.COMPLETED_NS] = now
        words[Word.COMPLETED_STEP] = self._step
        self._summary = StepSummary(self._step, self._step_started_ns, duration, self._totals.take())
        if self._mask:
            for operation, totals in list(self._summary.totals.items())[:_MAX_TOTALS]:
                self._write_total(operation.number, totals)
        return self._summary

    def record_value(self, kind: StepValue, value: float) -> None:
        """Record a number of the step; does nothing if all operations are switched off."""
        if self._mask:
            now = monotonic_ns()
            self._write(now, value_bits(value), now, 0, self._step, 0, -1, -1, int(kind), 0, RecordFlag.VALUE)

    def record_span(
        self, operation: Operation, start_ns: int, duration_ns: int, num_bytes: int = 0, chunk: int = -1
    ) -> None:
        """Record a span that has ended in another process or thread of this host.

        It belongs to the step in which it ended, but its time counts in the sums of the current step. In an evaluation
        it counts in no sums, because they are those of steps.
        Units: `start_ns` is a time of time.monotonic_ns.
        """
        if self._is_timed[operation.number]:
            before, end_ns = self._summary, start_ns + duration_ns
            step = self._step if before is None or end_ns >= self._step_started_ns else before.step
            self._write(start_ns, duration_ns, start_ns, num_bytes, step, 0, -1, chunk, operation.number, 0, 0)
            if self._phase is not Phase.EVALUATION:
                self._add_ended((operation.number, duration_ns, num_bytes, -1))

    def step_summary(self) -> StepSummary | None:
        """Return the totals of the last completed step; None before the first."""
        return self._summary

    def _write_total(self, number: int, totals: OperationTotals) -> None:
        self._write(
            *(self._step_started_ns, totals.sum_ns, totals.max_ns, totals.num_bytes, self._step, totals.count, -1, -1),
            *(number, 0, RecordFlag.STEP_TOTAL),
        )

    def set_phase(self, phase: Phase) -> None:
        """Set the phase of the rank, which determines how long a watcher waits. `set_step` sets the phases of steps."""
        if phase != self._phase:
            self._record_phase_time()
            self._phase = phase
            # A reader between these stores sees the old phase with the new start, never the new one with the old start.
            self._phase_began_ns = monotonic_ns()
            self._words[Word.PHASE_SINCE_NS] = self._phase_began_ns
            self._words[Word.PHASE] = phase

    def _record_phase_time(self) -> None:
        """Record the duration of the phase that ends now, from which the limits of later phases of its kind follow."""
        words, word = self._words, _LONGEST_WORDS.get(self._phase)
        if word is not None and self._summary is not None:
            words[word] = max(words[word], monotonic_ns() - self._phase_began_ns)

    def progress(self) -> Progress:
        """Return the progress of this rank from its black box, as other processes read it."""
        return decode_progress(self._words, "this rank's black box")

    def record_write_time(self, seconds: float) -> None:
        """Record how long a snapshot took from this host's memory to storage, if it is the longest so far."""
        words = self._words
        words[Word.LONGEST_WRITE_NS] = max(words[Word.LONGEST_WRITE_NS], int(seconds * _NS))

    def set_save_interval(self, seconds: float) -> None:
        """Record the current interval between checkpoints that are taken by time."""
        self._words[Word.SAVE_INTERVAL_NS] = int(seconds * _NS)

    def show_liveness(self) -> None:
        """Record a sign of life while the rank waits for something outside the job, such as storage."""
        self._words[Word.PHASE_SINCE_NS] = monotonic_ns()

    @property
    def path(self) -> Path | None:
        """The path of the black box; None without a file."""
        return self._writer.path

    def read_control(self) -> ControlPage:
        """Return the executor's current control page. Cheap if the page has not changed."""
        self.control = self._writer.next_control() or self.control
        return self.control

    def set_completed_command(self, number: int) -> None:
        """Record for the executor that the command with this number was carried out."""
        self._words[Word.COMPLETED_COMMAND] = number

    def close(self, *, keep: bool = False, has_failed: bool = False) -> None:
        """Stop recording. Removes the black box unless `keep` is set, which it must be after a failure."""
        if self._device is not None:
            self._device.close()
        self._is_timed = [False] * MAX_OPERATIONS
        self._writer.close(keep=keep, has_failed=has_failed)


def open_recorder(
    identity: Identity, *, directory: str, run_key: str, num_records: int, timer: DeviceTimer | None = None
) -> Recorder:
    """Return this rank's recorder with its black box in `directory`, or without one if that is "" or not usable."""
    recorder = Recorder(open_writer(identity, directory, run_key, num_records), timer)
    recorder.follow_device()
    return recorder
