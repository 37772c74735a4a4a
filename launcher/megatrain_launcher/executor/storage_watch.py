"""Watches storage for the host's status: whether checkpoints are stored, the free space of disks, and when it runs out.

A separate thread checks, because an unresponsive file system blocks its callers.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from megatrain.arena.plans import WriterStatus
from megatrain.config.config import Config
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.records.host_records import DiskSpace, HostSaves
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_launcher.driver.resume_point_watch import local_checkpoints
from megatrain_launcher.leftovers import find_snapshots

_POLL_S = 0.5
_DISK_S = 10.0
_NUM_SAMPLES = 360
"""The number of samples of a disk in an hour."""
_MAX_ERROR = 400
LEAST_S = 600.0
"""The shortest period for an estimate; a shorter one may contain only one checkpoint."""
_NUM_PARTS = 4


@dataclass(frozen=True, slots=True)
class StorageView:
    """The state of storage at the last poll."""

    saves: HostSaves | None = None
    disks: tuple[DiskSpace, ...] = ()


class StorageWatch:
    """Polls until `close`. Calls `on_change` when a checkpoint was saved or could not be saved."""

    def __init__(self, config: Config, run: RunDirectory, host: str, on_change: Callable[[], None]) -> None:
        self._config, self._run, self._host, self._on_change = config, run, host, on_change
        self._samples: dict[int, deque[SpaceSample]] = {}
        self._view = StorageView()
        self._closed = threading.Event()
        self._thread = RestartingThread("storage watch", self._poll_forever, self._closed)

    @property
    def view(self) -> StorageView:
        return self._view

    def close(self) -> None:
        """Stop the thread. A thread that storage blocks ends with the process."""
        self._closed.set()
        self._thread.join(_DISK_S)

    def _poll_forever(self) -> None:
        next_disk_s, disks = 0.0, self._view.disks
        while not self._closed.is_set():
            if time.monotonic() >= next_disk_s:
                disks, next_disk_s = self._disks(), time.monotonic() + _DISK_S
            before, self._view = self._view, StorageView(self._saves(), disks)
            if before.saves != self._view.saves:
                self._on_change()
            self._closed.wait(_POLL_S)

    def _saves(self) -> HostSaves | None:
        """Return the state of checkpoints from the newest writer status in this host's arenas."""
        found: list[WriterStatus] = []
        for arena in find_snapshots(self._config, self._run, self._host):
            with suppress(CheckpointError):
                found.append(WriterStatus.read(arena.writer_status))
        newest = max(found, key=lambda status: status.round, default=None)
        return None if newest is None else saves_of(newest)

    def _disks(self) -> tuple[DiskSpace, ...]:
        checkpoints = local_checkpoints(self._config, self._run)
        found: dict[int, DiskSpace] = {}
        for directory in (self._run.root, *([] if checkpoints is None else [checkpoints])):
            with suppress(OSError):
                device, file_system = os.stat(directory).st_dev, os.statvfs(directory)
                if device not in found:
                    free_bytes = file_system.f_bavail * file_system.f_frsize
                    samples = self._samples.setdefault(device, deque(maxlen=_NUM_SAMPLES))
                    samples.append(SpaceSample(time.monotonic(), free_bytes))
                    total_bytes = file_system.f_blocks * file_system.f_frsize
                    found[device] = DiskSpace(str(directory), free_bytes, total_bytes, full_in_s(samples))
        return tuple(found.values())


def saves_of(status: WriterStatus) -> HostSaves:
    """Return the state of the checkpoints from a writer's status."""
    error = status.last_error.encode(errors="backslashreplace").decode()
    return HostSaves(
        saved_step=status.last_persisted_step,
        saved_unix_s=status.persisted_unix_s,
        num_failed=status.num_failed,
        failing_unix_s=status.failing_unix_s,
        error=error[:_MAX_ERROR],
        num_bytes=status.last_write_bytes,
    )


@dataclass(frozen=True, slots=True)
class SpaceSample:
    """The free space of a disk at a time of the monotonic clock."""

    at_s: float
    free_bytes: int


def full_in_s(samples: Sequence[SpaceSample]) -> float | None:
    """Return in how many seconds the disk will be full if its free space keeps falling as in the samples.

    None if the disk does not fill, or if the samples cover too short a time.

    Free space goes up and down, because checkpoints are written in bursts and old ones are removed. So a disk counts as
    filling only if each quarter of the period has a lower median than the one before. `samples`: oldest first.
    """
    if not samples or (length_s := samples[-1].at_s - samples[0].at_s) < LEAST_S:
        return None
    part_s = length_s / _NUM_PARTS
    parts: list[list[int]] = [[] for _ in range(_NUM_PARTS)]
    for sample in samples:
        number = int((sample.at_s - samples[0].at_s) / part_s)
        parts[min(number, _NUM_PARTS - 1)].append(sample.free_bytes)
    if not all(parts):
        return None
    free = [median(part) for part in parts]
    if any(after >= before for before, after in pairwise(free)):
        return None
    return samples[-1].free_bytes * (_NUM_PARTS - 1) * part_s / (free[0] - free[-1])
