"""Finds and removes the files that a job leaves in this machine's memory after all its executors have exited.

Black boxes are removed at once. The writer processes keep the snapshots for checkpoint.keep_arena_s, so that the next
launch can resume from them. Once everything is saved, no launch needs the snapshots, and their writers are asked to
exit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.arena.directory import Arena, find_arenas, remove_arena, wake_writer
from megatrain.arena.plans import HostPlan, WriterStatus
from megatrain.config.config import Config
from megatrain.contracts.errors import CheckpointError
from megatrain.run_files.run_directory import RunDirectory, own_box_paths, safe_name

_POLL_S = 0.05
_REPORT_AFTER_S = 5.0
"""A writer exits within a second of the request, unless it has data to write. A wait longer than this is reported."""


def remove_black_boxes(config: Config, run: RunDirectory) -> None:
    """Remove the black boxes of a run without live workers."""
    if not config.telemetry.black_box_directory:
        return
    prefix = f"megatrain.{safe_name(config.job.name)}.{run.key}."
    for path in own_box_paths(Path(config.telemetry.black_box_directory)):
        if path.name.startswith(prefix) and path.name.endswith(".blackbox"):
            with suppress(OSError):
                path.unlink()


def find_snapshots(config: Config, run: RunDirectory, host: str = "") -> list[Arena]:
    """Return the arenas that hold snapshots of a run: of one host, or of all hosts on this machine."""
    location = config.checkpoint.directory or str(run.checkpoints)
    found = []
    for arena in find_arenas(Path(config.checkpoint.arena_directory)):
        if host and arena.root.name.rpartition(".")[2] != safe_name(host):
            continue
        with suppress(CheckpointError):
            host_plan = HostPlan.read(arena.host_plan)
            if host_plan.job == config.job.name and _is_same(host_plan.checkpoints, location):
                found.append(arena)
    return found


def release_snapshots(
    config: Config,
    run: RunDirectory,
    host: str = "",
    report: Callable[[str], None] = lambda text: None,
    timeout_s: float | None = None,
) -> list[Path]:
    """Remove the snapshots of a run and wait for their writers to exit; return the arenas left at the time limit.

    `host`: as for `find_snapshots`. `timeout_s`: the time limit, by default runtime.checkpoint_timeout_s, because a
    writer first completes the writes to storage.
    """
    leaving = [_Leaving(arena, _writer_of(arena)) for arena in find_snapshots(config, run, host)]
    for waiting in leaving:
        with suppress(CheckpointError):
            replace(HostPlan.read(waiting.arena.host_plan), keep_arena_s=0.0).write(waiting.arena.host_plan)
        wake_writer(waiting.arena)
    began = time.monotonic()
    limit_s = config.runtime.checkpoint_timeout_s if timeout_s is None else timeout_s
    is_reported = False
    while leaving := [waiting for waiting in leaving if not waiting.is_gone()]:
        waited_s = time.monotonic() - began
        if waited_s > limit_s:
            break
        if waited_s > _REPORT_AFTER_S and not is_reported:
            is_reported = True
            arenas = ", ".join(str(waiting.arena.root) for waiting in leaving)
            report(f"waiting for the checkpoint writer of {arenas} to finish")
        time.sleep(_POLL_S)
    return [waiting.arena.root for waiting in leaving]


@dataclass(frozen=True, slots=True)
class _Leaving:
    """An arena to remove, and its writer's process id, 0 if it had none."""

    arena: Arena
    writer: int

    def is_gone(self) -> bool:
        try:
            # refused while its writer, or a worker, uses it
            is_removed = remove_arena(self.arena.root)
        except CheckpointError:
            return False
        return is_removed and not self._has_writer()

    def _has_writer(self) -> bool:
        """Return whether the process still runs: a writer ends a moment after it has removed its arena."""
        try:
            arguments = Path(f"/proc/{self.writer}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return str(self.arena.root).encode() in arguments


def _writer_of(arena: Arena) -> int:
    try:
        return WriterStatus.read(arena.writer_status).pid
    except CheckpointError:
        return 0


def _is_same(one: str, other: str) -> bool:
    if "://" in one or "://" in other:
        return one == other
    return Path(one).absolute() == Path(other).absolute()
