"""Decides when to take snapshots of the state, and waits until the last one has reached storage."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.checkpoint.continuation import TrainingProgress
from megatrain.checkpoint.job import JobCheckpoints
from megatrain.checkpoint.save_policy import SaveInterval
from megatrain.config.config import Config
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import Command, Phase
from megatrain.contracts.errors import SaveError
from megatrain.reporting import Reporter
from megatrain.telemetry.recorder import Recorder
from megatrain.training.extensions import Callback
from megatrain.training.phases import Phases
from megatrain.training.step import Requests


class Saving:
    """Takes a snapshot when one is due or requested, at the step on which all ranks have agreed.

    decides_timed_saves: whether this rank decides, for all ranks, when a timed checkpoint is due; one rank does.
    reporter: None on all ranks except the reporting rank. callbacks: receive the step of each snapshot.
    """

    def __init__(
        self,
        config: Config,
        checkpoints: JobCheckpoints,
        recorder: Recorder,
        phases: Phases,
        reporter: Reporter | None,
        *,
        decides_timed_saves: bool,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._config = config.checkpoint
        self._timeout_s = config.runtime.checkpoint_timeout_s
        self._last_step = config.train.steps
        self._checkpoints = checkpoints
        self._recorder = recorder
        self._phases = phases
        self._reporter = reporter
        self._decides_timed_saves = decides_timed_saves
        self._callbacks = callbacks
        self._interval = SaveInterval(config.checkpoint)
        self._completed_command = 0
        self._saved_step = -1

    def record_loaded(self, step: int) -> None:
        """Record that the state of `step` was loaded, so it is already saved."""
        self._saved_step = step

    def is_requested(self) -> bool:
        """Whether the executor requests a checkpoint that this worker has not taken yet."""
        control = self._recorder.read_control()
        return control.command == Command.CHECKPOINT and control.command_number > self._completed_command

    def is_interval_over(self) -> bool:
        """Whether a checkpoint by time is due; False on all ranks except the one that decides."""
        return self._decides_timed_saves and self._interval.is_over(is_storing=self._checkpoints.is_storing)

    def after_step(self, progress: TrainingProgress, agreed: Requests, *, is_stopped: bool, is_skipping: bool) -> None:
        """Take a snapshot if one is due.

        is_stopped: training ends with this step because of a request. is_skipping: this step was skipped.
        """
        self.ensure_writer_runs()
        step = progress.step
        is_due = agreed.is_interval_over or (self._config.interval and step % self._config.interval == 0)
        # a skipped step changed nothing, and the weights may be the cause of a streak of skipped steps, so the earlier
        # checkpoint stays the newest
        is_due = is_due and not is_skipping
        is_end = step == self._last_step and self._config.save_at_end
        if (is_due or is_end or agreed.checkpoint or is_stopped) and step != self._saved_step:
            self._save(progress)
        if agreed.checkpoint:
            self._completed_command = self._recorder.control.command_number
            self._recorder.set_completed_command(self._completed_command)

    def finish(self, step: int) -> None:
        """Wait until the last snapshot is a committed checkpoint, because another job may get this host soon.

        This process may not have taken that snapshot itself: it may have resumed from a snapshot that is still on its
        way to storage.
        Raises: SaveError when the state of the last step, `step`, did not reach storage.
        """
        if self._saved_step < 0:
            return
        try:
            with self._phases.enter(Phase.STOPPING, self._timeout_s, Operation.CHECKPOINT):
                self._checkpoints.wait(self._saved_step)
        except SaveError as error:
            if self._saved_step == step:
                raise
            self._print_line(str(error))
        self.ensure_writer_runs()

    def ensure_writer_runs(self) -> None:
        """Keep a checkpoint writer running while a snapshot is not stored, and log the writer's messages."""
        self._checkpoints.ensure_writer_runs()
        if self._reporter is not None:
            for line in self._checkpoints.new_messages():
                self._reporter.print_line(line)

    def _save(self, progress: TrainingProgress) -> None:
        """Take a snapshot of the current state, which is copied to storage while training continues."""
        with self._phases.enter(Phase.CHECKPOINT, self._timeout_s, Operation.CHECKPOINT):
            times = self._checkpoints.take(progress)
        self._saved_step = progress.step
        self._interval.saved(times.stall_s)
        if self._config.is_by_time and self._decides_timed_saves:
            # a reader of the black box that judges whether a checkpoint is late needs the interval
            self._recorder.set_save_interval(self._interval.length_s)
        waited = f", {times.waited_s:.2f} s of it waiting for a free slot" if times.has_waited else ""
        self._print_line(
            f"snapshot of step {progress.step} taken in {times.stall_s:.3f} s{waited}; "
            f"it goes to {self._checkpoints.directory}"
        )
        for callback in self._callbacks:
            callback.on_checkpoint(progress.step)

    def _print_line(self, text: str) -> None:
        if self._reporter is not None:
            self._reporter.print_line(text)
