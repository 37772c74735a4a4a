"""Find out whether a job is writing to a directory of checkpoints, as far as this host can determine. Loads no torch.

Two signs are certain. Rank 0 holds the lock of its run directory, which usually contains the checkpoints. The workers
of a host hold the lock of their arena, whose plan names the directory of their checkpoints. If a job runs on other
hosts, and the file system does not share locks between hosts, there are only traces: a checkpoint that was begun
recently, or a complete one so recent that the next one is not overdue.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.arena.directory import Arena, find_arenas
from megatrain.arena.locks import is_held
from megatrain.arena.plans import HostPlan
from megatrain.arena.sealed import sealed_slots
from megatrain.arena.slot_layout import Persist
from megatrain.checkpoint.find import CHECKPOINTS_NAME
from megatrain.checkpoint.write_marks import WritingMark
from megatrain.checkpoint_format.branches import list_branches
from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.checkpoint_names import COMMIT_NAME, step_of
from megatrain.checkpoint_format.commit import is_committed
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import Manifest
from megatrain.config.checkpoint import CheckpointConfig
from megatrain.config.runtime import RuntimeConfig
from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.run_files.run_directory import RunDirectory

_NUM_EXAMINED = 3
"""How many of a branch's newest checkpoints are examined. The checkpoint in progress is always among them."""


@dataclass(frozen=True, slots=True)
class Activity:
    """The signs of a job, one clause each. `branches`: those that a job may be writing to now."""

    running: tuple[str, ...]
    """Certain signs."""
    traces: tuple[str, ...]
    """Signs of a job that may be running on other hosts. Empty when this host can rule that out."""
    branches: frozenset[str]
    is_branch_known: bool

    def may_write_to(self, branch: str) -> bool:
        """Return whether a job may be writing to a branch. A job whose branch is unknown may write to any."""
        return branch in self.branches or not self.is_branch_known


@dataclass(frozen=True, slots=True)
class _Newest:
    """A branch's newest checkpoints: the manifests of complete ones, newest first, and the marks of unfinished ones."""

    branch: str
    complete: tuple[Manifest, ...]
    begun: tuple[tuple[int, WritingMark], ...]


def find_job(checkpoints: Location) -> Activity:
    """Return the signs of a job in a directory of checkpoints.

    Raises: CheckpointError when a BRANCH file is damaged or something cannot be read.
    """
    newest = [_newest_of(checkpoints / branch.name, branch.name) for branch in list_branches(checkpoints)]
    by_age = sorted(
        (checkpoint for branch in newest for checkpoint in branch.complete),
        key=lambda checkpoint: checkpoint.written_unix_s,
    )
    config = by_age[-1].config if by_age else {}
    runs = _run_directories(checkpoints, config)
    running = [f"{holder} is training in {run.root}" for run in runs if (holder := run.holder()) is not None]
    branches: set[str] = set()
    is_branch_known = not running
    for arena, plan in _arenas_of(checkpoints, config):
        with suppress(MissingFileError):  # another process removed it meanwhile, so no job uses it
            if is_held(arena.workers_lock):
                running.append(f"workers of job {plan.job} are running on this host and save to {plan.branch}")
                branches.add(plan.branch)
                is_branch_known = True
            elif _is_writing(arena):
                branches.add(plan.branch)
    traces: list[str] = []
    if running or not any(run.was_held_here() for run in runs):
        begun_within_s = _setting(config, "runtime", "checkpoint_timeout_s", RuntimeConfig().checkpoint_timeout_s)
        for newest_of_branch in newest:
            found = list(_traces(newest_of_branch, begun_within_s))
            traces += found
            branches |= {newest_of_branch.branch} if found else set()
    return Activity(tuple(running), tuple(traces), frozenset(branches), is_branch_known)


def _newest_of(location: Location, branch: str) -> _Newest:
    complete: list[Manifest] = []
    begun: list[tuple[int, WritingMark]] = []
    numbered = [(step, entry) for entry in location.entries() if (step := step_of(entry.name)) is not None]
    for step, entry in sorted(numbered, key=lambda pair: pair[0], reverse=True)[:_NUM_EXAMINED]:
        with suppress(CheckpointError):  # a damaged checkpoint is no sign of a job
            if is_committed(entry):
                complete.append(read_manifest(entry))
            elif not (entry / COMMIT_NAME).exists() and (mark := WritingMark.read(entry)) is not None:
                begun.append((step, mark))
    return _Newest(branch, tuple(complete), tuple(begun))


def _traces(newest: _Newest, begun_within_s: float) -> Iterator[str]:
    now = time.time()
    for step, mark in newest.begun:
        if now - mark.started_unix_s < begun_within_s:
            yield f"step {step} of {newest.branch} was begun {_ago(now - mark.started_unix_s)} and is not complete"
    if not newest.complete:
        return
    last = newest.complete[0]
    age_s = now - last.written_unix_s
    before = newest.complete[1].written_unix_s if len(newest.complete) > 1 else last.written_unix_s - begun_within_s / 2
    is_last_step = last.step >= _setting(last.config, "train", "steps", 0)
    if not is_last_step and age_s < 2 * (last.written_unix_s - before):
        yield f"step {last.step} of {newest.branch} was saved {_ago(age_s)}, and the next save is not overdue"


def _ago(age_s: float) -> str:
    return f"{max(0.0, age_s):.0f} s ago" if age_s < 120 else f"{age_s / 60:.0f} min ago"


def _run_directories(checkpoints: Location, config: Any) -> list[RunDirectory]:
    path = _local_path(str(checkpoints))
    named = Path(_setting(config, "job", "run_directory", ""))
    found = [path.parent] if path is not None and path.name == CHECKPOINTS_NAME else []
    if named.is_absolute() and named.resolve() not in found:
        found.append(named.resolve())
    return [RunDirectory(root) for root in found]


def _arenas_of(checkpoints: Location, config: Any) -> Iterator[tuple[Arena, HostPlan]]:
    """Yield this user's arenas on this host whose snapshots go to `checkpoints`."""
    usual = CheckpointConfig().arena_directory
    for directory in dict.fromkeys([usual, _setting(config, "checkpoint", "arena_directory", usual)]):
        for arena in find_arenas(Path(directory)):
            with suppress(CheckpointError):  # a process is making or removing the arena
                plan = HostPlan.read(arena.host_plan)
                if _key(plan.checkpoints) == _key(str(checkpoints)):
                    yield arena, plan


def _is_writing(arena: Arena) -> bool:
    """Return whether the host's writer is running and still has a snapshot to write to storage."""
    is_running = is_held(arena.writer_lock)
    return is_running and any(slot.words.persist == Persist.PENDING for slot in sealed_slots(arena))


def _key(location: str) -> str:
    """Return a key that is equal for two spellings of the same location."""
    path = _local_path(location)
    return location.rstrip("/") if path is None else str(path)


def _local_path(location: str) -> Path | None:
    scheme, separator, rest = location.partition("://")
    if not separator:
        return Path(location).resolve()
    return Path(rest).resolve() if scheme == "file" else None


def _setting(config: Any, section: str, name: str, default: Any) -> Any:
    """Return a value of a manifest's configuration, or the default when another version wrote it differently."""
    table = config.get(section)
    value = table.get(name, default) if isinstance(table, dict) else default
    return value if type(value) is type(default) else default
