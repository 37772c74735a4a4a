"""The step loop in the test's own process: a real rank model on real data; its environment records the calls.

Notes are tuples of the called function and its arguments, in one list in the order of the calls.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from megatrain.checkpoint.continuation import TrainingProgress
from megatrain.checkpoint.job_restore import RestoreResult
from megatrain.checkpoint.snapshots import SnapshotTimes
from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.comm import Mesh, create_mesh
from megatrain.config.config import Config
from megatrain.config.recording import ProfileConfig
from megatrain.contracts.black_box.values import Identity
from megatrain.data.dataset import open_dataset
from megatrain.data.order import SampleOrder
from megatrain.reporting import EvaluationReport, Reporter, StepReport
from megatrain.telemetry.recorder import Recorder, open_recorder
from megatrain.training.observers.garbage_collection import PlannedGarbageCollection
from megatrain.training.observers.profiler import StepProfiler
from megatrain.training.observers.step_observer import CompletedStep
from megatrain.training.observers.step_observers import step_observers
from megatrain.training.rank_model import RankModel, build_rank_model
from megatrain.training.step_loop import StepLoop, StepLoopParts
from megatrain.training.training_data import open_validation
from tests.helpers.one_source import reader_of_one, stream_of_one
from tests.helpers.tiny_data import write_corpus
from tests.helpers.training_case import make_config

Note = tuple[Any, ...]
SMALL: dict[str, dict[str, Any]] = {
    "train": {"steps": 5},
    "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2},
    "batch": {"micro_batch_size": 2, "global_batch_size": 4},
}


def small_config(directory: Path, *changes: dict[str, dict[str, Any]]) -> Config:
    """Return a configuration of one small layer with tokens in `directory`, changed as `make_config` does."""
    train = write_corpus(directory / "train", 1000, 90, seed=1)
    validation = write_corpus(directory / "validation", 71, 90, seed=2)
    data = {"data": {"train": str(train), "validation": str(validation)}}
    return make_config(SMALL, data, *changes)


class _Checkpoints:
    """Replaces JobCheckpoints. `restored` is what `restore` returns."""

    directory = "nowhere"
    is_storing = False

    def __init__(self, notes: list[Note], stream: SampleStream) -> None:
        self._notes = notes
        self.stream = stream
        self.restored: RestoreResult | None = None

    def restore(self) -> RestoreResult | None:
        self._notes.append(("restore",))
        return self.restored

    def take(self, progress: TrainingProgress) -> SnapshotTimes:
        self._notes.append(("take", progress.step))
        return SnapshotTimes(progress.step, 0.25, 0.0)

    def wait(self, step: int) -> None:
        self._notes.append(("wait", step))

    def ensure_writer_runs(self) -> None:
        pass

    def new_messages(self) -> list[str]:
        return []


class _Profiler(StepProfiler):
    def __init__(self, notes: list[Note], directory: Path) -> None:
        super().__init__(ProfileConfig(), 0, directory)
        self._notes = notes

    def before_step(self, index: int) -> None:
        self._notes.append(("before step", index))

    def after_step(self, done: CompletedStep) -> str:
        self._notes.append(("after step", done.index))
        return ""


class _Garbage(PlannedGarbageCollection):
    def __init__(self, notes: list[Note], interval: int, recorder: Recorder) -> None:
        super().__init__(interval, recorder)
        self._notes = notes

    def after_step(self, done: CompletedStep) -> str:
        self._notes.append(("garbage", done.progress.step))
        return super().after_step(done)


@dataclass
class Reports:
    """Replaces the reporter."""

    steps: list[StepReport] = field(default_factory=list)
    evaluations: list[EvaluationReport] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def step(self, report: StepReport) -> None:
        self.steps.append(report)

    def evaluation(self, report: EvaluationReport) -> None:
        self.evaluations.append(report)

    def print_line(self, text: str) -> None:
        self.texts.append(text)


@dataclass
class SingleRankTrainer:
    """A trainer, and everything that it received."""

    config: Config
    trainer: StepLoop
    rank_model: RankModel
    recorder: Recorder
    checkpoints: _Checkpoints
    garbage: PlannedGarbageCollection
    reports: Reports
    notes: list[Note]
    stop: threading.Event
    """Set when a stop is requested."""

    def noted(self, *kinds: str) -> list[Note]:
        """Return the notes of these kinds."""
        return [note for note in self.notes if note[0] in kinds]

    def run(self) -> None:
        self.trainer.load()
        self.trainer.train()

    def close(self) -> None:
        """Restore what belongs to the whole process: Python's collector, the black box."""
        self.garbage.close()
        self.recorder.close()


def single_rank_trainer(config: Config, patch: pytest.MonkeyPatch) -> SingleRankTrainer:
    """Return a trainer of `config`; the caller closes it."""
    notes: list[Note] = []
    stop = threading.Event()
    layout = config.layout(1)
    recorder = open_recorder(
        Identity(config.job.name, "main", 0, 0, layout, os.getpid(), "host"),
        directory=config.telemetry.black_box_directory,
        run_key="test",
        num_records=config.telemetry.black_box_records,
    )
    set_phase = recorder.set_phase
    patch.setattr(recorder, "set_phase", lambda phase: (notes.append(("phase", phase)), set_phase(phase)))
    patch.setattr(Mesh, "set_timeout", lambda _, seconds: notes.append(("timeout", seconds)))
    device = torch.device("cpu")
    rank_model = build_rank_model(config, create_mesh(layout, 0, device, recorder), recorder, device)
    dataset, _ = open_dataset(Path(config.data.train), config.model.vocab_size)
    order = SampleOrder(dataset.num_tokens, config.model.seq_len, config.resolved_data_seed)
    reports, checkpoints = (
        Reports(),
        _Checkpoints(notes, stream_of_one(order.num_tokens, order.seed, seq_len=order.seq_len)),
    )
    garbage = _Garbage(notes, config.train.gc_interval, recorder)
    profiler = _Profiler(notes, Path(config.data.train).parent)
    stand_ins: dict[str, Any] = {"checkpoints": checkpoints, "reporter": reports}
    trainer = StepLoop(
        StepLoopParts(
            config=config,
            rank_model=rank_model,
            reader=reader_of_one(dataset, order, config.data.has_document_mask),
            validation=open_validation(config),
            recorder=recorder,
            observers=step_observers(config, rank_model, recorder, cast("Reporter", reports), profiler, garbage),
            is_stop_requested=stop.is_set,
            extend_grace=lambda seconds: notes.append(("grace", seconds)),
            **stand_ins,
        )
    )
    return SingleRankTrainer(config, trainer, rank_model, recorder, checkpoints, garbage, reports, notes, stop)
