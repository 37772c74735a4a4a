"""The step loop. Each part is a span and lives in its own module; this module only has the order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import perf_counter

from megatrain.assembly import Replica
from megatrain.checkpoint.continuation import Progress
from megatrain.checkpoint.job import JobCheckpoints
from megatrain.checkpoint.save_policy import SaveInterval
from megatrain.config.batch import batches_from
from megatrain.config.config import Config
from megatrain.contracts.black_box_values import Command, Phase
from megatrain.contracts.errors import NonFiniteError, SaveError
from megatrain.contracts.operations import Operation
from megatrain.contracts.sample_ranges import SampleRanges, position_after
from megatrain.contracts.step_values import StepValue
from megatrain.contracts.texts import bytes_text
from megatrain.data.indexed import IndexedDataset
from megatrain.data.prefetch import Prefetcher
from megatrain.data.reader import BatchReader, StepBatch
from megatrain.device_memory import DeviceMemory
from megatrain.evaluation import evaluate
from megatrain.garbage import PlannedGarbageCollection
from megatrain.optim import learning_rate
from megatrain.overlap_watch import OverlapWatch
from megatrain.profiling import StepProfiler
from megatrain.replica_check import ReplicaCheck
from megatrain.reporting import EvaluationReport, Reporter, StepReport
from megatrain.stop_notice import StopNotice
from megatrain.telemetry.compute_cost import compute_cost, device_name
from megatrain.telemetry.recorder import Recorder
from megatrain.training_step import Requests, StepOutcome, train_step


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """What the loop drives, built by worker.py. `reporter` is None but on the reporting rank."""

    config: Config
    replica: Replica
    reader: BatchReader
    validation: tuple[IndexedDataset, int | None] | None
    """The held-out tokens and the bytes of their text; see evaluation.open_validation."""
    checkpoints: JobCheckpoints
    recorder: Recorder
    profiler: StepProfiler
    garbage: PlannedGarbageCollection
    memory: DeviceMemory
    reporter: Reporter | None
    is_stop_requested: Callable[[], bool]
    extend_grace: Callable[[float], None]
    """Says how long a phase may take without a step boundary; 0 when it is over."""


class Trainer:
    """Trains from where the checkpoint left off to the last step, or until all ranks agree to stop."""

    def __init__(self, parts: TrainerParts) -> None:
        self._parts = parts
        self._config = parts.config
        self._progress = Progress()
        self._skipped: SampleRanges = ()
        self._interval = SaveInterval(parts.config.checkpoint)
        self._stop_notice = StopNotice(parts.config.runtime.save_grace_s)
        self._num_skipped_in_a_row = 0
        self._saved_step = -1
        self._obeyed_command = 0
        self._validation = parts.validation
        self._replica_check = self._make_replica_check()
        mesh = parts.replica.mesh
        self._overlap_watch = OverlapWatch(parts.config, mesh.layout, mesh.coordinate["pp"])
        self._cost = compute_cost(parts.config, device_name(parts.replica.device))
        self.is_stopped = False
        """Whether training ended early because it was asked to."""

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self._progress.step

    def load(self) -> None:
        """Draw the initial weights, or load the checkpoint to go on from."""
        replica, checkpoints = self._parts.replica, self._parts.checkpoints
        started = perf_counter()
        with self._phase(Phase.CHECKPOINT, self._config.runtime.checkpoint_timeout_s, Operation.CHECKPOINT_LOAD):
            restored = checkpoints.restore()
        self._skipped = checkpoints.skipped
        if restored is None:
            replica.initialise()
            self._note(f"initial weights drawn with train.seed={self._config.train.seed}")
            return
        self._progress = restored.continuation.progress
        replica.optimizer.num_updates = self._progress.num_updates
        replica.state_loaded()
        self._saved_step = self._progress.step
        for note in (*restored.notes, *restored.continuation.notes):
            self._note(note)
        self._note(
            f"resumed at step {self._progress.step} from {restored.source} in {perf_counter() - started:.2f} s "
            f"({bytes_text(restored.bytes_read)} read by rank 0)"
        )

    def train(self) -> None:
        """Run the step loop.

        Raises: NonFiniteError after train.max_skipped_steps skipped steps in a row; ReplicaError where ranks hold
        different parameters (train.checksum_interval); DataError, CheckpointError, CommunicationError as the parts
        raise them.
        """
        config, recorder = self._config, self._parts.recorder
        if self.step >= config.train.steps:
            self._note(f"nothing to do: {self.step} steps are done, train.steps={config.train.steps}")
        self._tell_news()  # of how checkpoints are taken
        self._parts.replica.set_training(True)
        mesh, first_step = self._parts.replica.mesh, self.step
        mesh.set_timeout(config.runtime.first_step_timeout_s)
        with Prefetcher(self._read_step, self._plan(), config.data.prefetch) as batches:
            while self.step < config.train.steps and not self.is_stopped:
                started = perf_counter()
                recorder.set_step(self.step)
                self._parts.profiler.before_step(self.step)
                with recorder.span(Operation.DATA_WAIT):
                    batch = batches.next()
                with recorder.span(Operation.STEP):
                    outcome = self._train_step(batch)
                self._advance(batch, outcome)
                self._note(self._overlap_watch.after_step(recorder.complete_step()))
                self._note(self._stop_notice.after_step(recorder.progress()))
                self._note_values(batch, outcome)
                if self.step == first_step + 1:
                    mesh.set_timeout(config.runtime.step_timeout_s)
                self._parts.profiler.after_step(self.step - 1)
                self._report(batch, outcome, perf_counter() - started)
                self._check_skips(outcome)
                self._parts.garbage.after_step(self.step)
                self._note(self._parts.memory.after_step(self.step))
                self.is_stopped = outcome.agreed.stop and self.step < config.train.steps
                self._tell_news()
                self._maybe_save(outcome.agreed)
                self._maybe_evaluate()
        recorder.set_phase(Phase.STOPPING)
        for chunk in self._parts.replica.data_parallel:
            chunk.finish_gather()  # no group may go while something is under way in it
        if self._saved_step >= 0:
            # also what this process did not take itself: it may have gone on from a snapshot that is still on its way
            self._wait_for_storage()

    def _plan(self) -> Iterator[tuple[int, int]]:
        """Return (cursor, global batch size) of every step to come."""
        batches = batches_from(self._config.batch, self._progress.consumed_samples, self._skipped)
        return islice(batches, max(0, self._config.train.steps - self.step))

    def _read_step(self, cursor: int, global_batch_size: int) -> StepBatch:
        mesh = self._parts.replica.mesh
        return self._parts.reader.read_step(
            cursor,
            global_batch_size,
            mesh.coordinate["dp"],
            mesh.layout.dp_size,
            self._config.batch.micro_batch_size,
            self._skipped,
        )

    def _train_step(self, batch: StepBatch) -> StepOutcome:
        config, replica = self._config, self._parts.replica
        schedule = config.parallel.build_schedule(len(batch.microbatches))
        inputs = [
            replica.pipeline_input(micro.tokens_SB, micro.labels_SB, micro.sample_B, micro.document_SB)
            for micro in batch.microbatches
        ]
        return train_step(
            replica,
            schedule,
            inputs,
            num_label_tokens=batch.num_label_tokens,
            lr=self._lr(self.step),
            grad_clip=config.optimizer.grad_clip,
            requests=self._requests,
            recorder=self._parts.recorder,
            check_replicas=self._check_of(self.step + 1),
        )

    def _make_replica_check(self) -> ReplicaCheck | None:
        interval, has_replicas = self._config.train.checksum_interval, self._parts.replica.mesh.layout.has_replicas
        if interval and not has_replicas:
            self._note(f"train.checksum_interval={interval}: no rank has a replica to compare with")
        return ReplicaCheck(interval, self._parts.replica) if interval and has_replicas else None

    def _check_of(self, step: int) -> Callable[[], None] | None:
        """Return what compares the replicas in this step, None where it is not due."""
        check = self._replica_check
        return partial(check.check, step) if check is not None and check.is_due(step) else None

    def _lr(self, step: int) -> float:
        return learning_rate(self._config.optimizer, step, self._config.resolved_lr_decay_steps)

    def _advance(self, batch: StepBatch, outcome: StepOutcome) -> None:
        """A skipped step counts as a step: its samples are consumed, and the learning rate moves on."""
        before = self._progress
        self._num_skipped_in_a_row = self._num_skipped_in_a_row + 1 if outcome.is_skipped else 0
        self._progress = Progress(
            step=before.step + 1,
            consumed_samples=position_after(before.consumed_samples, batch.global_batch_size, self._skipped),
            consumed_tokens=before.consumed_tokens + batch.global_batch_size * self._config.model.seq_len,
            num_updates=self._parts.replica.optimizer.num_updates,
            num_skipped=before.num_skipped + outcome.is_skipped,
        )

    def _check_skips(self, outcome: StepOutcome) -> None:
        count = self._num_skipped_in_a_row
        if outcome.is_skipped and count >= self._config.train.max_skipped_steps:
            raise NonFiniteError(
                f"loss={outcome.loss} and gradient norm={outcome.grad_norm} at step {self.step}: not finite for "
                f"{count} steps in a row (train.max_skipped_steps); lower optimizer.lr or use an older checkpoint"
            )

    def _maybe_evaluate(self) -> None:
        interval, is_last = self._config.evaluation.interval, self.step == self._config.train.steps
        is_due = is_last or (interval and self.step % interval == 0)
        if self._validation is None or not is_due or self.is_stopped:
            return
        dataset, text_bytes = self._validation
        started = perf_counter()
        with self._phase(Phase.EVALUATION, self._config.runtime.evaluation_timeout_s, Operation.EVALUATION):
            result = evaluate(self._parts.replica, dataset, text_bytes)
        if self._parts.reporter is not None:
            self._parts.reporter.evaluation(
                EvaluationReport(
                    step=self.step,
                    loss=result.loss,
                    num_tokens=result.num_tokens,
                    bits_per_byte=result.bits_per_byte,
                    duration_s=perf_counter() - started,
                )
            )

    def _maybe_save(self, agreed: Requests) -> None:
        config = self._config.checkpoint
        is_due = agreed.is_interval_over or (config.interval and self.step % config.interval == 0)
        # a skipped step changed nothing, and the weights of a streak of them may be the cause: the one before stays
        is_due = is_due and self._num_skipped_in_a_row == 0
        is_end = self.step == self._config.train.steps and config.save_at_end
        if (is_due or is_end or agreed.checkpoint or self.is_stopped) and self.step != self._saved_step:
            self._save()
        if agreed.checkpoint:
            self._obeyed_command = self._parts.recorder.control.command_number
            self._parts.recorder.set_obeyed_command(self._obeyed_command)

    def _save(self) -> None:
        """Take a snapshot of the state as it is; it gets to storage while training goes on."""
        checkpoints = self._parts.checkpoints
        with self._phase(Phase.CHECKPOINT, self._config.runtime.checkpoint_timeout_s, Operation.CHECKPOINT):
            times = checkpoints.take(self._progress)
        self._saved_step = self.step
        self._interval.saved(times.stall_s)
        self._tell_interval()
        waited = f", {times.waited_s:.2f} s of it for room" if times.has_waited else ""
        self._note(
            f"snapshot of step {self.step} taken in {times.stall_s:.3f} s{waited}; it goes to {checkpoints.directory}"
        )

    def _tell_interval(self) -> None:
        """Say when the next checkpoint is due to whoever judges whether it is late; on the rank that decides it."""
        if self._config.checkpoint.is_by_time and self._parts.replica.mesh.rank == 0:
            self._parts.recorder.set_save_interval(self._interval.length_s)

    def _wait_for_storage(self) -> None:
        """Come back when the last snapshot is a committed checkpoint: soon the whole host may be given to another.

        Raises: SaveError when the last step's state did not get to storage.
        """
        try:
            with self._phase(Phase.STOPPING, self._config.runtime.checkpoint_timeout_s, Operation.CHECKPOINT):
                self._parts.checkpoints.wait(self._saved_step)
        except SaveError as error:
            if self._saved_step == self.step:
                raise
            self._note(str(error))
        self._tell_news()

    def _tell_news(self) -> None:
        self._parts.checkpoints.tend()
        if self._parts.reporter is not None:
            for line in self._parts.checkpoints.news():
                self._note(line)

    def _requests(self) -> Requests:
        """Return what this rank is asked for now."""
        parts, obeyed = self._parts, self._obeyed_command
        control = parts.recorder.read_control()
        return Requests(
            stop=parts.is_stop_requested(),
            checkpoint=control.command == Command.CHECKPOINT and control.command_number > obeyed,
            # one rank looks at the clock, for all
            is_interval_over=parts.replica.mesh.rank == 0
            and self._interval.is_over(is_storing=parts.checkpoints.is_storing),
        )

    @contextmanager
    def _phase(self, phase: Phase, timeout_s: float, operation: Operation) -> Iterator[None]:
        """A span in a phase of its own: watchers and collectives wait as long as that phase may take."""
        mesh, recorder = self._parts.replica.mesh, self._parts.recorder
        mesh.set_timeout(timeout_s)
        self._parts.extend_grace(timeout_s)
        recorder.set_phase(phase)
        with recorder.span(operation):
            yield
        self._parts.extend_grace(0.0)
        mesh.set_timeout(self._config.runtime.step_timeout_s)

    def _note_values(self, batch: StepBatch, outcome: StepOutcome) -> None:
        """Write down what the step came to, for the diagnosis: each rank writes its own, because any of them may
        die."""
        note, replica = self._parts.recorder.note_value, self._parts.replica
        num_tokens = batch.global_batch_size * self._config.model.seq_len
        note(StepValue.LOSS, outcome.loss)
        note(StepValue.GRAD_NORM, outcome.grad_norm)
        note(StepValue.TOKENS, num_tokens)
        note(StepValue.LABEL_TOKENS, batch.num_label_tokens)
        note(StepValue.SQUARED_LENGTHS, batch.squared_lengths)
        note(StepValue.MODEL_FLOPS, num_tokens / replica.mesh.layout.world_size * self._cost.flops_per_token)
        if self._cost.peak is not None:
            note(StepValue.PEAK_FLOPS, self._cost.peak)
        if replica.device.type == "cuda":
            note(StepValue.DEVICE_BYTES, self._parts.memory.peak_bytes())

    def _report(self, batch: StepBatch, outcome: StepOutcome, duration_s: float) -> None:
        reporter = self._parts.reporter
        if reporter is None:
            return
        summary = self._parts.recorder.step_summary()
        done = self._progress
        reporter.step(
            StepReport(
                step=done.step,
                loss=outcome.loss,
                grad_norm=outcome.grad_norm,
                lr=self._lr(done.step - 1),
                duration_s=duration_s,
                data_wait_s=summary.sum_ms(Operation.DATA_WAIT) / 1e3 if summary is not None else 0.0,
                num_tokens=batch.global_batch_size * self._config.model.seq_len,
                consumed_samples=done.consumed_samples,
                consumed_tokens=done.consumed_tokens,
                global_batch_size=batch.global_batch_size,
                is_skipped=outcome.is_skipped,
                num_skipped=done.num_skipped,
                memory_bytes=self._parts.memory.peak_bytes(),
                world_size=self._parts.replica.mesh.layout.world_size,
            )
        )

    def _note(self, text: str) -> None:
        if text and self._parts.reporter is not None:
            self._parts.reporter.note(text)
