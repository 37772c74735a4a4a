"""The ranks of benchmark `checkpoint`: they save in turns, load, restore from memory, and train during a write."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint_sides import (
    CheckpointSide,
    PlainWrite,
    SharedBuffers,
    TensorCopies,
    TorchAsyncSave,
    TorchSave,
    TwoStages,
    WholeCopy,
    copy_bytes,
)
from benchmarks.checkpoint_state import RankState, build_state
from megatrain.checkpoint.continuation import TrainingProgress
from megatrain.checkpoint.job import JobCheckpoints
from megatrain.checkpoint.load import LoadReport, load_state
from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.checkpoint_names import step_directory_name
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.comm import Mesh, create_mesh, open_rendezvous
from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.contracts.process import Process
from megatrain.parallel.pipeline import PipelineInput
from megatrain.schedule import build_schedule
from megatrain.telemetry.black_box_writer import BlackBoxWriter
from megatrain.telemetry.recorder import Recorder
from megatrain.training.rank_model import RankModel, build_rank_model
from megatrain.training.step import Requests, train_step
from tests.helpers.one_source import stream_of_one
from tests.helpers.rank_protocol import RankContext

BUCKET_SIZE = 8_000_000
_OTHER_BUCKET_SIZE = 3_000_000
_LONGEST_BLOCK_S = 60.0
_STEP_SEQ_LEN, _STEP_BATCH = 128, 4
_STEP_TABLES: dict[str, dict[str, Any]] = {
    "model": {"vocab_size": 2048, "seq_len": _STEP_SEQ_LEN, "hidden_size": 256, "num_layers": 4, "num_heads": 4},
    "parallel": {"dp_size": 2},
    "batch": {"micro_batch_size": _STEP_BATCH, "global_batch_size": 2 * _STEP_BATCH},
    "train": {"steps": 1, "precision": "fp32"},
    "optimizer": {"lr": 1e-4},
    "runtime": {"device": "cpu", "threads": 1},
}


@dataclass(frozen=True, slots=True)
class BenchmarkPlaces:
    """Directories of one measurement, empty at first. `storage`: on a disk; `memory`: for arenas and copies."""

    storage: Path
    memory: Path


@dataclass(slots=True)
class SaveFigures:
    """The measurements of one rank. windows: by side and phase, one (begin, end) a round; the first is the warm-up."""

    state_bytes: int = 0
    num_tensors: int = 0
    windows: dict[tuple[str, str], list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    planning_calls: int = 0
    calls_by_take: list[int] = field(default_factory=list)
    checkpoint_bytes: int = 0
    bytes_read: dict[str, int] = field(default_factory=dict)
    """By how the state that is filled is cut."""
    bytes_received: dict[str, int] = field(default_factory=dict)
    load_windows: dict[str, tuple[float, float]] = field(default_factory=dict)
    restore_windows: list[tuple[float, float]] = field(default_factory=list)
    restore_bytes_read: int = 0


def measure_saves(
    context: RankContext, tables: dict[str, Any], num_rounds: int, places: BenchmarkPlaces
) -> SaveFigures:
    """Run one rank of all measurements except that of the step."""
    mesh, config = _join(context, tables, places)
    state = build_state(config, mesh, BUCKET_SIZE)
    checkpoints = _job(config, mesh, state, places)
    figures = SaveFigures(state_bytes=state.num_bytes, num_tensors=len(state.shards))
    calls = mesh.cpu_groups.num_calls
    checkpoints.restore()
    figures.planning_calls = mesh.cpu_groups.num_calls - calls
    ours = TwoStages(checkpoints, lambda: mesh.cpu_groups.num_calls)
    _take_turns(_sides(state, ours, places), num_rounds, figures)
    figures.calls_by_take = ours.calls_by_take
    _load(
        LocalLocation(Path(checkpoints.directory) / step_directory_name(ours.last_step)), config, state, mesh, figures
    )
    checkpoints.close(is_done=False)
    _restore_from_memory(config, mesh, state, places, num_rounds, figures)
    return figures


def _sides(state: RankState, ours: TwoStages, places: BenchmarkPlaces) -> list[CheckpointSide]:
    buffers = SharedBuffers(places.memory, copy_bytes(state))
    return [
        TensorCopies(state, buffers),
        ours,
        WholeCopy(state, buffers),
        TorchAsyncSave(state, places.storage, keeps_stager=True),
        PlainWrite(buffers, places.storage, is_alone=True),
        TorchAsyncSave(state, places.storage, keeps_stager=False),
        PlainWrite(buffers, places.storage, is_alone=False),
        TorchSave(state, places.storage),
    ]


def _take_turns(sides: list[CheckpointSide], num_rounds: int, figures: SaveFigures) -> None:
    """Run all sides once to warm up and then num_rounds times, in alternating order."""
    for number in range(num_rounds + 1):
        for side in sides if number % 2 == 0 else reversed(sides):
            with _all_together():
                windows = side.run(number)
            for phase, window in windows.items():
                figures.windows[side.name, phase].append(window)
            dist.barrier()
            if dist.get_rank() == 0:
                side.remove(number)
    for side in sides:
        side.close()


@contextmanager
def _all_together() -> Iterator[None]:
    """Begin on all ranks at once, after all earlier writes have reached the disk."""
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    yield


def _load(place: LocalLocation, config: Config, state: RankState, mesh: Mesh, figures: SaveFigures) -> None:
    """Fill from storage the state with the saved cut, and a state with another cut."""
    figures.checkpoint_bytes = sum(entry.size for entry in read_manifest(place).files.values())
    _fill_from(place, "same cut", state, mesh, figures)
    _fill_from(place, "another cut", build_state(config, mesh, _OTHER_BUCKET_SIZE), mesh, figures)


def _fill_from(place: LocalLocation, cut: str, state: RankState, mesh: Mesh, figures: SaveFigures) -> None:
    state.clear()
    if mesh.rank == 0:
        _drop_from_page_cache(place.path)
    with _all_together():
        started = time.perf_counter()
        shards = [(shard.kind, shard.shard) for shard in state.shards]
        report: LoadReport = load_state(place, read_manifest(place), shards, mesh.rank, mesh.cpu_groups)
        figures.load_windows[cut] = (started, time.perf_counter())
    figures.bytes_read[cut], figures.bytes_received[cut] = report.bytes_read, report.bytes_received
    if not state.is_filled():
        raise AssertionError(f"rank {mesh.rank}, {cut}: what was loaded is not what was saved")


def _drop_from_page_cache(directory: Path) -> None:
    for path in directory.iterdir():
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def _restore_from_memory(
    config: Config, mesh: Mesh, state: RankState, places: BenchmarkPlaces, num_rounds: int, figures: SaveFigures
) -> None:
    """Do what the workers of a job do after earlier workers crashed: plan, enter the arena, copy."""
    for number in range(num_rounds + 1):
        state.clear()
        with _all_together():
            started = time.perf_counter()
            checkpoints = _job(config, mesh, state, places)
            restored = checkpoints.restore()
            figures.restore_windows.append((started, time.perf_counter()))
        if restored is None or not restored.source.startswith("the memory"):
            raise AssertionError(f"rank {mesh.rank}: not restored from memory: {restored}")
        if not state.is_filled():
            raise AssertionError(f"rank {mesh.rank}: what was restored is not what was saved")
        figures.restore_bytes_read += restored.bytes_read
        dist.barrier()
        checkpoints.close(is_done=number == num_rounds)


@dataclass(frozen=True, slots=True)
class SaveStepFigures:
    """Mean seconds of a step, one value for each block; the first block is the warm-up. `alone` has as many steps."""

    beside: list[float]
    alone: list[float]
    num_steps: list[int]
    """The number of steps of each block."""
    stage_2_s: list[float]
    """The seconds from the seal until rank 0 knew that the checkpoint is stored, cut off after a time limit."""
    num_unfinished: int
    """The number of blocks that ended before storage had the checkpoint."""


def measure_steps(
    context: RankContext, tables: dict[str, Any], num_rounds: int, places: BenchmarkPlaces
) -> SaveStepFigures:
    """Train with the real step on two ranks, with and without a writer that brings a state to storage meanwhile."""
    mesh, config = _join(context, tables, places)
    state = build_state(config, mesh, BUCKET_SIZE)
    checkpoints = _job(config, mesh, state, places)
    checkpoints.restore()
    steps = _Steps(mesh)
    figures = SaveStepFigures([], [], [], [], 0)
    num_unfinished = 0
    for number in range(num_rounds + 1):
        step = number + 1
        num_steps = figures.num_steps[-1] if figures.num_steps else 0
        if number % 2:
            with _all_together():
                figures.alone.append(steps.run(num_steps))
        with _all_together():
            checkpoints.take(TrainingProgress(step=step, num_updates=step))
        taken = time.perf_counter()
        num_steps, seconds, is_stored = steps.run_until_news(checkpoints)
        figures.stage_2_s.append(time.perf_counter() - taken)
        figures.beside.append(seconds)
        figures.num_steps.append(num_steps)
        num_unfinished += not is_stored
        checkpoints.wait(step)
        if number % 2 == 0:
            with _all_together():
                figures.alone.append(steps.run(num_steps))
    dist.barrier()
    checkpoints.close(is_done=True)
    return replace(figures, num_unfinished=num_unfinished)


class _Steps:
    """The trainer's step on a small model, with ZeRO over two ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self._recorder = Recorder(BlackBoxWriter.anonymous())
        config = Config.from_dict(_STEP_TABLES)
        self._rank_model: RankModel = build_rank_model(config, mesh, self._recorder, mesh.device)
        self._rank_model.initialise()
        self._rank_model.set_training(True)
        shape = (_STEP_SEQ_LEN, _STEP_BATCH)
        tokens, labels = torch.randint(2048, shape), torch.randint(2048, shape)
        self._inputs: list[PipelineInput] = [
            self._rank_model.pipeline_input(tokens, labels, torch.arange(_STEP_BATCH), None)
        ]
        self.run(5)

    def run(self, num_steps: int) -> float:
        """Train `num_steps` steps and return the mean seconds of one."""
        started = time.perf_counter()
        for _ in range(num_steps):
            self._step(is_over=False)
        return (time.perf_counter() - started) / max(num_steps, 1)

    def run_until_news(self, checkpoints: JobCheckpoints) -> tuple[int, float, bool]:
        """Train until the checkpoint is stored; return the steps, the mean seconds of one, and whether it is stored."""
        started = time.perf_counter()
        num_steps, is_stored, is_over = 0, False, False
        while not is_over:
            is_stored = bool(checkpoints.new_messages()) or is_stored
            is_late = time.perf_counter() - started > _LONGEST_BLOCK_S
            is_over = self._step(is_over=is_stored or is_late)
            num_steps += 1
        return num_steps, (time.perf_counter() - started) / num_steps, is_stored

    def _step(self, *, is_over: bool) -> bool:
        """Train one step; return whether any rank has requested the end."""
        outcome = train_step(
            self._rank_model,
            build_schedule("1f1b", 1, 1, 1),
            self._inputs,
            num_label_tokens=_STEP_SEQ_LEN * _STEP_BATCH,
            lr=1e-4,
            grad_clip=1.0,
            requests=lambda: Requests(stop=is_over),
            recorder=self._recorder,
        )
        return outcome.agreed.stop


def _join(context: RankContext, tables: dict[str, Any], places: BenchmarkPlaces) -> tuple[Mesh, Config]:
    """Join the other ranks, which are all data-parallel, in a connected world group, which torch's checkpoints need."""
    device, size = torch.device("cpu"), context.world_size
    process = Process(context.rank, size, context.rank, size, 0, context.init_method)
    rendezvous = open_rendezvous(process, job="benchmark", timeout_s=300.0)
    if rendezvous is not None:
        store = dist.PrefixStore(rendezvous.prefix, rendezvous.store)
        dist.init_process_group("gloo", store=store, rank=context.rank, world_size=size)
    mesh = create_mesh(Layout(dp_size=size), context.rank, device, Recorder(BlackBoxWriter.anonymous()),
                       has_wrap_links=False)  # fmt: skip
    checkpoint = {"arena_directory": str(places.memory), "slots": 2, "keep_arena_s": 60.0}
    parallel = {"dp_size": size, "bucket_size": BUCKET_SIZE}
    return mesh, Config.from_dict({**tables, "checkpoint": checkpoint, "parallel": parallel})


def _job(config: Config, mesh: Mesh, state: RankState, places: BenchmarkPlaces) -> JobCheckpoints:
    return JobCheckpoints(
        config,
        mesh,
        state.shards,
        stream_of_one(0, seed=0),
        local_rank=mesh.rank,
        round_number=0,
        directory=str(places.storage / "checkpoints"),
        logs=places.storage,
    )
