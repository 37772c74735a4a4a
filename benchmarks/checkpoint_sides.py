"""The sides of benchmark `checkpoint`: each stores or copies the same bytes of all ranks once, and returns the times.

Every side writes new files, which are removed outside its measured time. All ranks call a side together.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.checkpoint_state import RankState
from megatrain.checkpoint.continuation import TrainingProgress
from megatrain.checkpoint.job import JobCheckpoints
from megatrain.checkpoint_format.checkpoint_names import step_directory_name

_MADV_POPULATE_WRITE = 23
_ALIGNMENT = 64

Windows = dict[str, tuple[float, float]]
"""By name of a phase: when this rank began and ended the phase, on the clock that all processes of a machine share."""


class CheckpointSide(ABC):
    """One way to store or copy the state."""

    name: str

    @abstractmethod
    def run(self, number: int) -> Windows:
        """Store or copy the state once. `number` counts the calls, from 0."""

    def remove(self, number: int) -> None:
        """Remove the files of that call, on rank 0. By default there are none."""
        return None

    def close(self) -> None:
        """Free what was kept from one call to the next."""
        return None


class SharedBuffers:
    """One pre-faulted file of shared memory for each rank: the target of plain copies and source of plain writes."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self._paths = [directory / f"copy-{other}" for other in range(size)]
        with self._paths[rank].open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        dist.barrier()
        self._maps = [_map(path) for path in self._paths]
        self.own: NDArray[np.uint8] = np.frombuffer(self._maps[rank], dtype=np.uint8)

    def views(self, ranks: list[int]) -> list[memoryview]:
        """Return the bytes that the plain copies of these ranks have written."""
        return [memoryview(self._maps[rank]) for rank in ranks]


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    with suppress(OSError):
        mapped.madvise(_MADV_POPULATE_WRITE)
    return mapped


def copy_bytes(state: RankState) -> int:
    """Return the bytes of shared memory that a copy tensor by tensor takes."""
    return sum(_aligned(shard.shard.tensor.nbytes) for shard in state.shards)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class TensorCopies(CheckpointSide):
    """Copies each tensor to its own place, as checkpoints must. The views are made beforehand."""

    name = "copy, tensor by tensor"

    def __init__(self, state: RankState, buffers: SharedBuffers) -> None:
        self._pairs = []
        end = 0
        for shard in state.shards:
            source = shard.shard.tensor.reshape(-1).numpy().view(np.uint8)
            self._pairs.append((buffers.own[end : end + source.size], source))
            end += _aligned(source.size)

    def run(self, number: int) -> Windows:
        started = time.perf_counter()
        for target, source in self._pairs:
            np.copyto(target, source)
        return {"copy": (started, time.perf_counter())}


class WholeCopy(CheckpointSide):
    """Copies the same number of bytes in one call, so that libc can choose its method for large copies."""

    name = "copy, one memcpy a rank"

    def __init__(self, state: RankState, buffers: SharedBuffers) -> None:
        # memory from torch, like the state's: numpy's own would be in huge pages
        self._source = torch.ones(state.num_bytes, dtype=torch.uint8).numpy()
        self._target = buffers.own[: state.num_bytes]

    def run(self, number: int) -> Windows:
        started = time.perf_counter()
        np.copyto(self._target, self._source)
        return {"copy": (started, time.perf_counter())}


class TwoStages(CheckpointSide):
    """megatrain's side: JobCheckpoints.take, and then a wait for COMMIT."""

    name = "megatrain"

    def __init__(self, checkpoints: JobCheckpoints, num_calls: Callable[[], int]) -> None:
        self._checkpoints = checkpoints
        self._num_calls = num_calls
        self.calls_by_take: list[int] = []
        self.last_step = 0

    def run(self, number: int) -> Windows:
        step = number + 1
        calls = self._num_calls()
        started = time.perf_counter()
        self._checkpoints.take(TrainingProgress(step=step, num_updates=step))
        taken = time.perf_counter()
        self.calls_by_take.append(self._num_calls() - calls)
        self._checkpoints.wait(step)
        self.last_step = step
        return {"stall": (started, taken), "stage 2": (taken, time.perf_counter())}

    def remove(self, number: int) -> None:
        """Remove the previous checkpoint; the newest one is loaded later."""
        shutil.rmtree(Path(self._checkpoints.directory) / step_directory_name(number), ignore_errors=True)


class TorchSave(CheckpointSide):
    """dcp.save of the same plain tensors, with one key for each box and its default writer, which syncs."""

    name = "dcp.save"

    def __init__(self, state: RankState, directory: Path) -> None:
        self._tensors = torch_state(state)
        self._directory = directory

    def run(self, number: int) -> Windows:
        place = self._directory / f"save-{number}"
        started = time.perf_counter()
        dcp.save(self._tensors, checkpoint_id=place)
        return {"save": (started, time.perf_counter())}

    def remove(self, number: int) -> None:
        shutil.rmtree(self._directory / f"save-{number}")


class TorchAsyncSave(CheckpointSide):
    """dcp.async_save of the same tensors. `keeps_stager`: reuse the memory of the previous save, unlike the default."""

    def __init__(self, state: RankState, directory: Path, *, keeps_stager: bool) -> None:
        self.name = "dcp.async_save, stager kept" if keeps_stager else "dcp.async_save"
        self._tensors = torch_state(state)
        self._directory = directory
        self._stager: DefaultStager | None = None
        if keeps_stager:
            # the other options need CUDA
            self._stager = DefaultStager(StagingOptions(False, False, False, False))

    def run(self, number: int) -> Windows:
        started = time.perf_counter()
        saved = dcp.async_save(self._tensors, checkpoint_id=self._place(number), async_stager=self._stager)
        returned = time.perf_counter()
        cast("Future[Any]", saved).result()
        return {"stall": (started, returned), "save": (started, time.perf_counter())}

    def remove(self, number: int) -> None:
        shutil.rmtree(self._place(number))

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()

    def _place(self, number: int) -> Path:
        return self._directory / f"{self.name.replace(' ', '-')}-{number}"


def torch_state(state: RankState) -> dict[str, Tensor]:
    """Return the state in the form of torch's checkpoints: one key for each box, so that no two ranks share a key."""
    return {
        f"{shard.kind}.{shard.shard.name}.{','.join(map(str, shard.shard.box.offsets))}": shard.shard.tensor
        for shard in state.shards
    }


class PlainWrite(CheckpointSide):
    """Writes the bytes to new files and syncs them: one process writes all, or every rank writes its own."""

    def __init__(self, buffers: SharedBuffers, directory: Path, *, is_alone: bool) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.name = f"write and fsync by {1 if is_alone else size}"
        self._directory = directory
        self._label = f"plain-{1 if is_alone else size}"
        ranks = [rank] if not is_alone else list(range(size)) if rank == 0 else []
        self._views = buffers.views(ranks)
        self._rank = rank

    def run(self, number: int) -> Windows:
        started = time.perf_counter()
        if self._views:
            file = os.open(self._path(number, self._rank), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                for view in self._views:
                    done = 0
                    while done < len(view):
                        done += os.write(file, view[done:])
                os.fsync(file)
            finally:
                os.close(file)
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
            return {"write": (started, time.perf_counter())}
        return {"write": (started, started)}

    def remove(self, number: int) -> None:
        for rank in range(dist.get_world_size()):
            self._path(number, rank).unlink(missing_ok=True)

    def _path(self, number: int, rank: int) -> Path:
        return self._directory / f"{self._label}-{number}-{rank}"
