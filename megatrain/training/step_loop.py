"""The step loop: the order of a run. Other modules contain the step itself, its observers, saves and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from megatrain.checkpoint.continuation import TrainingProgress
from megatrain.checkpoint.job import JobCheckpoints
from megatrain.config.config import Config
from megatrain.config.model_products import document_cost
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import Phase
from megatrain.contracts.errors import DataError, NonFiniteError
from megatrain.contracts.sample_ranges import SampleRanges, position_after
from megatrain.data.epochs import check_epochs, source_uses, uses_text
from megatrain.data.loader.host_loader import HostLoader
from megatrain.data.prefetch import Prefetcher
from megatrain.data.reader import BatchReader
from megatrain.data.sample_costs import sample_cost
from megatrain.data.step_batch import StepBatch
from megatrain.formatting import bytes_text
from megatrain.optim import learning_rate
from megatrain.reporting import Reporter
from megatrain.telemetry.recorder import Recorder
from megatrain.training.bad_samples import BadSamples
from megatrain.training.batch_notes import batch_notes, length_notes
from megatrain.training.evaluation import Evaluations
from megatrain.training.extensions import Callback
from megatrain.training.observers.step_observer import CompletedStep, StepObserver
from megatrain.training.phases import Phases
from megatrain.training.rank_model import RankModel
from megatrain.training.read_records import record_reads
from megatrain.training.replica_check import ReplicaCheck
from megatrain.training.saving import Saving
from megatrain.training.step import Requests, StepOutcome, train_step
from megatrain.training.step_batches import open_batches
from megatrain.training.training_data import ValidationSet, all_shards, shown_wait


@dataclass(frozen=True, slots=True)
class StepLoopParts:
    """The parts that the loop drives, built by worker.py. `reporter` is None on all ranks except the reporting rank."""

    config: Config
    rank_model: RankModel
    reader: BatchReader
    validation: Sequence[ValidationSet]
    checkpoints: JobCheckpoints
    recorder: Recorder
    observers: Sequence[StepObserver]
    reporter: Reporter | None
    is_stop_requested: Callable[[], bool]
    extend_grace: Callable[[float], None]
    """Delays the start of the watchdog's grace period to at least this many seconds from now; see Watchdog.extend."""
    callbacks: Sequence[Callback] = ()
    """The loop calls them for evaluations and snapshots; an observer calls them for steps."""


class StepLoop:
    """Trains from the step of the checkpoint to the last step, or until all ranks agree to stop."""

    def __init__(self, parts: StepLoopParts) -> None:
        config, mesh = parts.config, parts.rank_model.mesh
        self._parts = parts
        self._config = config
        self._progress = TrainingProgress()
        self._reader = parts.reader
        self._excluded_samples: SampleRanges = ()
        """Samples that the job skips since a rollback."""
        self._num_skipped_in_a_row = 0
        self._phases = Phases(mesh, parts.recorder, parts.extend_grace, config.runtime.step_timeout_s)
        self._saving = Saving(
            config,
            parts.checkpoints,
            parts.recorder,
            self._phases,
            parts.reporter,
            decides_timed_saves=mesh.rank == 0,
            callbacks=parts.callbacks,
        )
        self._evaluations = Evaluations(
            parts.rank_model, parts.validation, self._phases, parts.recorder, parts.reporter, parts.callbacks
        )
        self._replica_check = self._make_replica_check()
        self._bad_samples: BadSamples | None = None
        """None if the run does not replace bad samples."""
        self.is_stopped = False
        """Whether training ended early because of a request."""

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return self._progress.step

    def load(self) -> None:
        """Draw the initial weights, or load the checkpoint from which training continues."""
        rank_model, checkpoints = self._parts.rank_model, self._parts.checkpoints
        started = perf_counter()
        with self._phases.enter(Phase.CHECKPOINT, self._config.runtime.checkpoint_timeout_s, Operation.CHECKPOINT_LOAD):
            restored = checkpoints.restore()
        self._excluded_samples = checkpoints.stream.skipped
        self._reader = self._parts.reader.following(checkpoints.stream)
        if self._config.data.bad_samples == "replace":
            self._bad_samples = BadSamples(rank_model.mesh, [source.name for source in checkpoints.stream.sources])
        if restored is None:
            rank_model.initialize()
            self._print_line(f"initial weights drawn with train.seed={self._config.train.seed}")
            return
        self._progress = restored.continuation.progress
        rank_model.optimizer.num_updates = self._progress.num_updates
        rank_model.refresh_derived_state()
        self._saving.record_loaded(self.step)
        for note in (*restored.notes, *restored.continuation.notes):
            self._print_line(note)
        self._print_line(
            f"resumed at step {self.step} from {restored.source} in {perf_counter() - started:.2f} s "
            f"({bytes_text(restored.bytes_read)} read by rank 0)"
        )

    def train(self) -> None:
        """Run the step loop.

        Raises: NonFiniteError after train.max_skipped_steps skipped steps in a row; ReplicaError when replicas have
        different parameters (train.checksum_interval); ConfigError, DataError, CheckpointError, SaveError,
        CommunicationError from the parts.
        """
        config, recorder, observers = self._config, self._parts.recorder, self._parts.observers
        if self.step >= config.train.steps:
            self._print_line(
                f"nothing to do: {self.step} {'step is' if self.step == 1 else 'steps are'} done, "
                f"train.steps={config.train.steps}"
            )
        self._check_data()
        layout, progress = self._parts.rank_model.mesh.layout, self._progress
        for note in batch_notes(config, layout, progress.step, progress.consumed_samples, self._excluded_samples):
            self._print_line(note)
        for note in length_notes(config, self._reader, progress, self._excluded_samples):
            self._print_line(note)
        self._saving.ensure_writer_runs()
        self._parts.rank_model.set_training(True)
        with ExitStack() as closing:
            batches = self._batches(closing)
            while self.step < config.train.steps and not self.is_stopped:
                started = perf_counter()
                for observer in observers:
                    observer.before_step(self.step)
                with recorder.span(Operation.DATA_WAIT):
                    batch = batches.next(shown_wait(self._reader, recorder.show_liveness))
                record_reads(recorder, batch)
                slots = config.num_microbatches(layout, batch.global_batch_size)
                recorder.set_work(slots * sample_cost(document_cost(config.model), batch.seq_len))
                with recorder.span(Operation.STEP):
                    batch, outcome = self._train_agreed(batch)
                done = self._complete(batch, outcome, perf_counter() - started)
                for observer in observers:
                    self._print_line(observer.after_step(done))
                self._check_skips(outcome)
                self.is_stopped = outcome.agreed.stop and self.step < config.train.steps
                self._saving.after_step(
                    self._progress, outcome.agreed, is_stopped=self.is_stopped, is_skipping=outcome.is_skipped
                )
                if self.is_stopped:
                    self._print_line(self._evaluations.left_out(self.step))
                else:
                    self._evaluations.after_step(self.step)
        recorder.set_phase(Phase.STOPPING)
        for chunk in self._parts.rank_model.data_parallel:
            chunk.finish_gather()  # no group may be destroyed while it carries out an exchange
        self._saving.finish(self.step)

    def _batches(self, closing: ExitStack) -> Prefetcher | HostLoader:
        """Open the batches of the remaining steps."""
        config, mesh, progress = self._config, self._parts.rank_model.mesh, self._progress
        num_steps = max(0, config.train.steps - self.step)
        steps = config.steps(mesh.layout, progress.consumed_samples, num_steps, self._excluded_samples)
        checkpoints, print_line = self._parts.checkpoints, self._print_line
        held_out = all_shards(self._reader, self._parts.validation)[1:]
        return open_batches(config, mesh, self._reader, steps, checkpoints, print_line, closing, held_out)

    def _check_data(self) -> None:
        """Raise DataError, before the first step, if the run would read a source more often than allowed."""
        cursor, remaining = self._progress.consumed_samples, max(0, self._config.train.steps - self.step)
        end = self._config.batch_schedule.cursor_after(cursor, remaining, self._excluded_samples)
        uses = source_uses(self._reader, end, cursor, self._excluded_samples)
        check_epochs(uses)
        if len(uses) > 1:
            self._print_line(f"sources until step {self._config.train.steps}: {uses_text(uses)}")

    def _train_agreed(self, batch: StepBatch) -> tuple[StepBatch, StepOutcome]:
        """Carry out a step in which all ranks of a replica replace the same samples. Return batch and outcome."""
        outcome = self._train_step(batch)
        if self._bad_samples is None:
            return batch, outcome
        if outcome.is_disputed:
            batch = self._bad_samples.agreed(batch, self._end_of(batch))
            outcome = self._train_step(batch)
            if outcome.is_disputed:
                raise DataError(
                    f"step {self.step + 1}: the ranks of a replica cannot agree on the bad samples to replace"
                )
        self._bad_samples.after_step(batch, outcome)
        return batch, outcome

    def _end_of(self, batch: StepBatch) -> int:
        """Return the position of the run after the step."""
        return position_after(batch.cursor, batch.global_batch_size, self._excluded_samples)

    def _train_step(self, batch: StepBatch) -> StepOutcome:
        config, rank_model = self._config, self._parts.rank_model
        schedule = config.parallel.build_schedule(len(batch.microbatches))
        inputs = [rank_model.input_of(micro) for micro in batch.microbatches]
        return train_step(
            rank_model,
            schedule,
            inputs,
            num_label_tokens=batch.num_label_tokens,
            lr=self._lr(self.step),
            grad_clip=config.optimizer.grad_clip,
            requests=self._requests,
            recorder=self._parts.recorder,
            sources=batch.sources,
            replaced=None if self._bad_samples is None else self._bad_samples.own_part(batch),
            check_replicas=self._check_of(self.step + 1),
        )

    def _complete(self, batch: StepBatch, outcome: StepOutcome, duration_s: float) -> CompletedStep:
        """Count the step. A skipped step counts too: its samples are consumed, and the learning rate advances."""
        before = self._progress
        self._num_skipped_in_a_row = self._num_skipped_in_a_row + 1 if outcome.is_skipped else 0
        self._progress = TrainingProgress(
            step=before.step + 1,
            consumed_samples=self._end_of(batch),
            consumed_tokens=before.consumed_tokens + batch.num_tokens,
            num_updates=self._parts.rank_model.optimizer.num_updates,
            num_skipped=before.num_skipped + outcome.is_skipped,
        )
        return CompletedStep(before.step, batch, outcome, self._progress, self._lr(before.step), duration_s)

    def _check_skips(self, outcome: StepOutcome) -> None:
        count = self._num_skipped_in_a_row
        if outcome.is_skipped and count >= self._config.train.max_skipped_steps:
            raise NonFiniteError(
                f"loss={outcome.loss} and gradient norm={outcome.grad_norm} at step {self.step}: not finite for "
                f"{count} step{'s' if count > 1 else ''} in a row (train.max_skipped_steps); lower optimizer.lr or use "
                "an older checkpoint"
            )

    def _requests(self) -> Requests:
        """Return the requests to this rank."""
        return Requests(
            stop=self._parts.is_stop_requested(),
            checkpoint=self._saving.is_requested(),
            is_interval_over=self._saving.is_interval_over(),
        )

    def _make_replica_check(self) -> ReplicaCheck | None:
        interval, has_replicas = self._config.train.checksum_interval, self._parts.rank_model.mesh.layout.has_replicas
        if interval and not has_replicas:
            self._print_line(f"train.checksum_interval={interval}: no rank has a replica to compare with")
        return ReplicaCheck(interval, self._parts.rank_model) if interval and has_replicas else None

    def _check_of(self, step: int) -> Callable[[], None] | None:
        """Return the function that compares the replicas in this step, or None if no check is due."""
        check = self._replica_check
        return partial(check.check, step) if check is not None and check.is_due(step) else None

    def _lr(self, step: int) -> float:
        return learning_rate(self._config.optimizer, step, self._config.resolved_lr_decay_steps)

    def _print_line(self, text: str) -> None:
        if text and self._parts.reporter is not None:
            self._parts.reporter.print_line(text)
