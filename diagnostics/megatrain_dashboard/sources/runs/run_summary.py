"""The summary of a run directory: its state, progress and checkpoints. Reading it takes bounded time and never raises.

A run that has ended does not change, so a caller keeps the summary until one of the files has changed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.incident import Incident
from megatrain.formatting import printable
from megatrain.run_files.incidents import read_incident
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.sources.run_files import read_config
from megatrain_dashboard.sources.runs.metrics_history import Outline, outline_of, read_metrics_history
from megatrain_job.jobs.own_etcd import COORDINATION_DIRECTORY, ENDPOINT_FILE
from megatrain_job.jobs.run_state import (
    EXIT_CODE_FILE,
    LastKnown,
    RunFacts,
    RunState,
    read_facts,
    read_last_known,
    run_state_of,
)

HISTORY_BYTES = 256 * 1024
"""Bytes of the metrics that are read: a file of about six hundred steps as a whole, a larger one in pieces of 8 KiB."""
_MAX_INCIDENTS = 100
_MAX_BRANCHES = 64
_SHOWN_CHARACTERS = 300
_WATCHED = (
    ".", "config.toml", "lock", COORDINATION_DIRECTORY, f"{COORDINATION_DIRECTORY}/lock", EXIT_CODE_FILE, ENDPOINT_FILE,
    "metrics", "metrics/metrics.jsonl", "incidents", "checkpoints",
)  # fmt: skip

Signature = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class RunSummary:
    """A run directory at the time when it was read. Times are unix seconds."""

    root: Path
    facts: RunFacts
    run_state: RunState
    job: str
    """The name in its configuration; else the name of the directory."""
    outline: Outline = field(default_factory=Outline)
    last: LastKnown = field(default_factory=LastKnown)
    incidents: tuple[Incident, ...] = ()
    """The newest hundred, by id."""
    num_incidents: int = 0
    written_unix_s: float | None = None
    """The time of the last write to any of the watched files."""
    ended_unix_s: float | None = None
    problems: tuple[str, ...] = ()
    """One sentence for each problem of the directory."""


def signature_of(root: Path) -> Signature:
    """Return a value that changes when a run is launched, continues, saves, fails or ends."""
    found = []
    for name in (*_WATCHED, *_branches(root)):
        with suppress(OSError):
            status = os.stat(root / name, follow_symlinks=False)
            found.append((name, status.st_mtime_ns, status.st_size))
    return tuple(found)


def read_run_summary(root: Path) -> RunSummary:
    """Read the summary of a run directory. Its `problems` name what cannot be read."""
    run = RunDirectory(root)
    problems = []
    with suppress(FileNotFoundError):
        try:
            os.listdir(root)
        except OSError as error:
            problems.append(f"the directory cannot be read: {error.strerror}")
    facts = read_facts(root)
    config, problem = read_config(run)
    problems.append(problem)
    outline = Outline()
    try:
        outline = outline_of(read_metrics_history(run, HISTORY_BYTES))
    except OSError as error:
        problems.append(f"metrics/metrics.jsonl {error.strerror}")
    incidents, num_incidents, problem = _incidents(run)
    problems.append(problem)
    ended_s = _written_s(root / EXIT_CODE_FILE) if facts.exit_code is not None else outline.end_s
    written = [mtime_ns / 1e9 for name, mtime_ns, _ in signature_of(root) if name != "."]
    train_steps = None if config is None else config.train.steps
    last = replace(read_last_known(root), step=outline.last_step, train_steps=train_steps)
    return RunSummary(
        root=root,
        facts=facts,
        run_state=run_state_of(facts, last),
        job=root.name if config is None else config.job.name,
        outline=outline,
        last=last,
        incidents=incidents,
        num_incidents=num_incidents,
        written_unix_s=max(written, default=None),
        ended_unix_s=None if facts.is_held else ended_s,
        problems=tuple(printable(text)[:_SHOWN_CHARACTERS] for text in problems if text),
    )


def _incidents(run: RunDirectory) -> tuple[tuple[Incident, ...], int, str]:
    """Return the newest incidents, the number of all incidents, and the problems with some of them."""
    try:
        names = sorted(name for name in os.listdir(run.incidents) if name.endswith(".json") and name[0] != ".")
    except OSError:
        return (), 0, ""
    found, problems = [], []
    for name in names[-_MAX_INCIDENTS:]:
        try:
            found.append(read_incident(run.incidents / name))
        except CoordinationError as error:
            problems.append(str(error))
    num_others = len(problems) - 1
    return (
        tuple(found),
        len(names),
        f"{problems[0]}{f' (and {num_others} more)' if num_others else ''}" if problems else "",
    )


def _branches(root: Path) -> list[str]:
    try:
        names = sorted(os.listdir(root / "checkpoints"))[-_MAX_BRANCHES:]
    except OSError:
        return []
    return [f"checkpoints/{name}" for name in names]


def _written_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
