"""Whether this host's checkpoints are stored, and how much room their disks have: the status's part about storage.

A thread of its own looks: a file system that is away holds up whoever asks it for something.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.config.config import Config
from megatrain.contracts.arena_plans import WriterStatus
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.host_records import DiskRoom, HostSaves
from megatrain.contracts.run_directory import RunDirectory, safe_name
from megatrain.coordination.lasting_thread import LastingThread
from megatrain.jobs.disk_trend import RoomSample, full_in_s
from megatrain_launcher.launch.leftovers import find_snapshots

_LOOK_S = 0.5
_DISK_S = 10.0
_NUM_SAMPLES = 360
"""An hour of looks at a disk."""
_MAX_ERROR = 400


@dataclass(frozen=True, slots=True)
class StorageView:
    """As of the last look."""

    saves: HostSaves | None = None
    disks: tuple[DiskRoom, ...] = ()


class StorageWatch:
    """Looks until `close`. `on_change` is called when a checkpoint was saved, or was not."""

    def __init__(self, config: Config, run: RunDirectory, host: str, on_change: Callable[[], None]) -> None:
        self._config, self._run, self._host, self._on_change = config, run, host, on_change
        self._samples: dict[int, deque[RoomSample]] = {}
        self._view = StorageView()
        self._closed = threading.Event()
        self._thread = LastingThread("storage watch", self._look_on, self._closed)

    @property
    def view(self) -> StorageView:
        return self._view

    def close(self) -> None:
        """End the thread, unless storage holds it up: then it ends with the process."""
        self._closed.set()
        self._thread.join(_DISK_S)

    def _look_on(self) -> None:
        next_disk_s, disks = 0.0, self._view.disks
        while not self._closed.is_set():
            if time.monotonic() >= next_disk_s:
                disks, next_disk_s = self._disks(), time.monotonic() + _DISK_S
            before, self._view = self._view, StorageView(self._saves(), disks)
            if before.saves != self._view.saves:
                self._on_change()
            self._closed.wait(_LOOK_S)

    def _saves(self) -> HostSaves | None:
        """Return what the newest writer of this host's arenas tells."""
        found: list[WriterStatus] = []
        for arena in find_snapshots(self._config, self._run):
            if arena.root.name.endswith(f".{safe_name(self._host)}"):
                with suppress(CheckpointError):
                    found.append(WriterStatus.read(arena.writer_status))
        newest = max(found, key=lambda one: one.round, default=None)
        return None if newest is None else saves_of(newest)

    def _disks(self) -> tuple[DiskRoom, ...]:
        places = [self._run.root, *self._checkpoints()]
        found: dict[int, DiskRoom] = {}
        for place in places:
            with suppress(OSError):
                device, room = os.stat(place).st_dev, os.statvfs(place)
                if device not in found:
                    free_bytes = room.f_bavail * room.f_frsize
                    samples = self._samples.setdefault(device, deque(maxlen=_NUM_SAMPLES))
                    samples.append(RoomSample(time.monotonic(), free_bytes))
                    total_bytes = room.f_blocks * room.f_frsize
                    found[device] = DiskRoom(str(place), free_bytes, total_bytes, full_in_s(samples))
        return tuple(found.values())

    def _checkpoints(self) -> list[Path]:
        place = self._config.checkpoint.directory
        return [] if not place or "://" in place else [Path(place)]


def saves_of(status: WriterStatus) -> HostSaves:
    """Return what a writer's status says of its checkpoints."""
    error = status.last_error.encode(errors="backslashreplace").decode()
    return HostSaves(
        saved_step=status.last_persisted_step,
        saved_unix_s=status.persisted_unix_s,
        num_failed=status.num_failed,
        failing_unix_s=status.failing_unix_s,
        error=error[:_MAX_ERROR],
        num_bytes=status.last_write_bytes,
    )
