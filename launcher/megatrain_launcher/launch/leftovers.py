"""What a job leaves in this machine's memory when all its executors are gone, and taking it away.

Black boxes of executors that were killed go at once. Snapshots stay for checkpoint.keep_arena_s, in the care of their
writer processes, so that the next launch can go on from them; where all is saved they are of no use, and their writers
are told to end.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megatrain.config.config import Config
from megatrain.contracts.arena import Arena, find_arenas, remove_arena, wake_writer
from megatrain.contracts.arena_plans import HostPlan
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.run_directory import RunDirectory, own_box_paths, safe_name

_POLL_S = 0.05
_WRITER_S = 10.0
"""A writer that was told to end looks within a second, unless it has something to write."""


def remove_black_boxes(config: Config, run: RunDirectory) -> None:
    """Remove the black boxes of a run that nobody trains in."""
    if not config.telemetry.black_box_directory:
        return
    prefix = f"megatrain.{safe_name(config.job.name)}.{run.key}."
    for path in own_box_paths(Path(config.telemetry.black_box_directory)):
        if path.name.startswith(prefix) and path.name.endswith(".blackbox"):
            with suppress(OSError):
                path.unlink()


def find_snapshots(config: Config, run: RunDirectory) -> list[Arena]:
    """Return the arenas that hold snapshots of a run."""
    place = config.checkpoint.directory or str(run.checkpoints)
    found = []
    for arena in find_arenas(Path(config.checkpoint.arena_directory)):
        with suppress(CheckpointError):
            told = HostPlan.read(arena.host_plan)
            if told.job == config.job.name and _is_same(told.checkpoints, place):
                found.append(arena)
    return found


def release_snapshots(config: Config, run: RunDirectory, timeout_s: float = _WRITER_S) -> list[Path]:
    """Have the snapshots of a run removed, and wait for it; return those that are still there.

    What is on its way to storage gets there first.
    """
    arenas = find_snapshots(config, run)
    for arena in arenas:
        with suppress(CheckpointError):
            replace(HostPlan.read(arena.host_plan), keep_arena_s=0.0).write(arena.host_plan)
        wake_writer(arena)
    deadline = time.monotonic() + timeout_s
    left = [arena.root for arena in arenas]
    while left := [path for path in left if not _is_removed(path)]:
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    return left


def _is_removed(path: Path) -> bool:
    try:
        return remove_arena(path)  # refused as long as its writer, or a worker, is in it
    except CheckpointError:
        return False


def _is_same(one: str, other: str) -> bool:
    if "://" in one or "://" in other:
        return one == other
    return Path(one).absolute() == Path(other).absolute()
