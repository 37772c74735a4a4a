"""The ranks of benchmark `checkpoint`: they save in turns, load, and restore from memory."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from megatrain.checkpoint.job import JobCheckpoints
from megatrain.checkpoint.load import LoadReport, load_state
from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.checkpoint_names import step_directory_name
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.comm import Mesh, create_mesh, open_rendezvous
from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.contracts.process import Process
from megatrain.telemetry.black_box_writer import BlackBoxWriter
from megatrain.telemetry.recorder import Recorder
from tests.helpers.one_source import stream_of_one
from tests.helpers.rank_protocol import RankContext

BUCKET_SIZE = 8_000_000
_OTHER_BUCKET_SIZE = 3_000_000


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
    """By the cut of the state that is filled: that of the checkpoint, or another one."""
    bytes_received: dict[str, int] = field(default_factory=dict)
    load_windows: dict[str, tuple[float, float]] = field(default_factory=dict)
    restore_windows: list[tuple[float, float]] = field(default_factory=list)
    restore_bytes_read: int = 0


def measure_saves(
    context: RankContext, tables: dict[str, Any], num_rounds: int, places: BenchmarkPlaces
) -> SaveFigures:
    """Run one rank of all measurements except that of the step."""
    mesh, config = join_ranks(context, tables, places)
    state = build_state(config, mesh, BUCKET_SIZE)
    checkpoints = open_job(config, mesh, state, places)
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
            with all_together():
                windows = side.run(number)
            for phase, window in windows.items():
                figures.windows[side.name, phase].append(window)
            dist.barrier()
            if dist.get_rank() == 0:
                side.remove(number)
    for side in sides:
        side.close()


@contextmanager
def all_together() -> Iterator[None]:
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
    with all_together():
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
        with all_together():
            started = time.perf_counter()
            checkpoints = open_job(config, mesh, state, places)
            restored = checkpoints.restore()
            figures.restore_windows.append((started, time.perf_counter()))
        if restored is None or not restored.source.startswith("the memory"):
            raise AssertionError(f"rank {mesh.rank}: not restored from memory: {restored}")
        if not state.is_filled():
            raise AssertionError(f"rank {mesh.rank}: what was restored is not what was saved")
        figures.restore_bytes_read += restored.bytes_read
        dist.barrier()
        checkpoints.close(is_done=number == num_rounds)


def join_ranks(context: RankContext, tables: dict[str, Any], places: BenchmarkPlaces) -> tuple[Mesh, Config]:
    """Join the other ranks, which are all data-parallel, in a connected world group, which torch's checkpoints need."""
    device, size = torch.device("cpu"), context.world_size
    process = Process(context.rank, size, context.rank, size, 0, context.init_method)
    rendezvous = open_rendezvous(process, job="benchmark", timeout_s=300.0)
    if rendezvous is not None:
        store = dist.PrefixStore(rendezvous.prefix, rendezvous.store)
        dist.init_process_group("gloo", store=store, rank=context.rank, world_size=size)
    mesh = create_mesh(Layout(dp_size=size), context.rank, device, Recorder(BlackBoxWriter.anonymous()))
    checkpoint = {"arena_directory": str(places.memory), "slots": 2, "keep_arena_s": 60.0}
    parallel = {"dp_size": size, "bucket_size": BUCKET_SIZE}
    return mesh, Config.from_dict({**tables, "checkpoint": checkpoint, "parallel": parallel})


def open_job(config: Config, mesh: Mesh, state: RankState, places: BenchmarkPlaces) -> JobCheckpoints:
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
