"""The state of a run whose etcd does not answer, from its directory: ended, killed, unreachable, never started.

The launch that starts a run's own etcd holds <run>/coordination/lock as long as it lives. It writes
<run>/coordination/exit-code when it ends; under Slurm, it writes that file only after exit code 0 or 75. A free lock
without that file counts as a launch that was killed.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatrain.checkpoint_format.branches import list_branches
from megatrain.checkpoint_format.commit import committed_steps
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.contracts.errors import CheckpointError, CoordinationError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.files.bounded_files import open_below, read_below
from megatrain.contracts.files.file_locks import is_locked
from megatrain.contracts.records.incident import Incident, IncidentState
from megatrain.formatting import count_text
from megatrain.run_files.incidents import read_incident
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.jobs.health import Health, Reason, ReasonCode, health_of
from megatrain_job.jobs.job_state import JobState
from megatrain_job.jobs.own_etcd import COORDINATION_DIRECTORY

EXIT_CODE_FILE = f"{COORDINATION_DIRECTORY}/exit-code"
_LOCK_FILE = f"{COORDINATION_DIRECTORY}/lock"
_MAX_BYTES = 1 << 12
_MAX_DIGITS = 3


class RunKind(StrEnum):
    """Whether a run is running, is over, or cannot be reached."""

    RUNNING = "running"
    """Its etcd answers, and hosts are registered."""
    ENDED = "ended"
    KILLED = "killed"
    """Its launch is gone, and no end is recorded."""
    UNREACHABLE = "unreachable"
    """Its etcd does not answer, and nothing proves that the run is over."""
    NEVER_STARTED = "never started"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts in a run's directory.

    holder: the process that holds the lock of a launch, or held it last; without such a lock, the run lock's holder.
    """

    is_run: bool
    exit_code: int | None = None
    has_launch: bool = False
    """A launch with its own etcd has used the directory."""
    is_held: bool = False
    """A process of the run is alive."""
    holder: str = ""
    is_of_here: bool = True
    """The last holder was a process of this machine, so a free lock means that it is gone."""


@dataclass(frozen=True, slots=True)
class LastKnown:
    """The last state of the job in a run's directory: its newest checkpoint and incident, and its progress."""

    saved_step: int | None = None
    saved_unix_s: float | None = None
    incident: Incident | None = None
    step: int | None = None
    """The last reported step, if the metrics have been read."""
    train_steps: int | None = None
    """The number of all steps, if the configuration has been read."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run if etcd does not answer. code: why a person must act; None if no action is needed."""

    kind: RunKind
    headline: str
    exit_code: int | None = None
    code: ReasonCode | None = None

    @property
    def health(self) -> Health:
        """The health that follows from `code`."""
        return health_of([] if self.code is None else [Reason(self.code, self.headline)])

    @property
    def state(self) -> str:
        """The state in at most three words; for a run that ended, the same words as from etcd."""
        if self.kind is not RunKind.ENDED:
            return str(self.kind)
        if self.code is not None:
            return str(JobState.FAILED)
        return str(JobState.SAVED if self.exit_code == ExitCode.SAVED_AND_STOPPED else JobState.FINISHED)


_NOTHING_KNOWN = LastKnown()


def run_state_of(facts: RunFacts, last: LastKnown = _NOTHING_KNOWN) -> RunState:
    """Return the state that a run's directory shows.

    last: if no exit code is recorded and no launch on this machine was killed, the state follows from it. The text
    about a failed run quotes its incident. Pure function.
    """
    who = f" ({facts.holder})" if facts.holder else ""
    if not facts.is_run:
        return RunState(RunKind.NEVER_STARTED, "never started: no launch has written anything there")
    if facts.is_held:
        text = f"unreachable: its launch{who} is running, and its etcd does not answer"
        return RunState(RunKind.UNREACHABLE, text, code=ReasonCode.UNREACHABLE)
    if facts.exit_code is not None:
        return _ended(facts.exit_code, last.incident)
    if facts.has_launch and facts.is_of_here:
        text = f"killed: its launch{who} is gone, and no end of the job is recorded; launch it again to continue"
        return RunState(RunKind.KILLED, text, code=ReasonCode.NOT_RUNNING)
    if last.step is not None and last.train_steps is not None and last.step >= last.train_steps:
        return RunState(RunKind.ENDED, f"ended: all {count_text(last.train_steps, 'step')} are done")
    if last.incident is not None and last.incident.state is IncidentState.STOPPED:
        return RunState(RunKind.ENDED, f"ended: stopped by {_incident_text(last.incident)}", code=ReasonCode.FAILED)
    text = "unreachable: it was launched with an etcd elsewhere; use --rdzv-endpoint as the launch did"
    if facts.has_launch:
        text = f"unreachable: its etcd does not answer, and whether its launch{who} is running cannot be seen from here"
    return RunState(RunKind.UNREACHABLE, text, code=ReasonCode.UNREACHABLE)


def read_facts(run: Path) -> RunFacts:
    """Return the facts in a run's directory. The directory's owner cannot redirect these reads elsewhere."""
    own = RunDirectory(run)
    try:
        has_any = any(own.owns(name) for name in os.listdir(run))
    except OSError:
        return RunFacts(is_run=False)
    has_launch = os.path.lexists(run / _LOCK_FILE)
    holder = _text(run, _LOCK_FILE)
    trainer = own.holder()
    return RunFacts(
        is_run=has_any,
        exit_code=recorded_exit_code(run),
        has_launch=has_launch,
        is_held=trainer is not None or _is_held(run),
        holder=holder or trainer or "",
        is_of_here=holder.endswith(f" on {socket.gethostname()}"),
    )


def recorded_exit_code(run: Path) -> int | None:
    """Return the exit code that the last launch recorded; None if there is none."""
    text = _text(run, EXIT_CODE_FILE)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None


def read_last_known(run: Path) -> LastKnown:
    """Return the newest checkpoint and incident below a run's directory; unreadable ones are left out."""
    own = RunDirectory(run)
    saved: tuple[float, int] | None = None
    with suppress(CheckpointError, OSError):
        for branch in list_branches(LocalLocation(own.checkpoints)):
            directory = own.checkpoints / branch.name
            for step in committed_steps(LocalLocation(directory))[-1:]:
                found = (directory.stat().st_mtime, step)
                saved = found if saved is None else max(saved, found)
    incident = None
    newest = max((path for path in own.incidents.glob("*.json") if not path.name.startswith(".")), default=None)
    with suppress(CoordinationError):
        if newest is not None:
            incident = read_incident(newest)
    return LastKnown(None if saved is None else saved[1], None if saved is None else saved[0], incident)


def _is_held(run: Path) -> bool:
    try:
        with open(open_below(run, _LOCK_FILE), "rb") as file:
            return is_locked(file.fileno()) is True
    except OSError:
        return False


def _text(run: Path, name: str) -> str:
    try:
        return read_below(run, name, _MAX_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return ""


def _ended(exit_code: int, last: Incident | None) -> RunState:
    if exit_code == ExitCode.OK:
        return RunState(RunKind.ENDED, "ended: it finished (exit code 0)", exit_code)
    if exit_code == ExitCode.SAVED_AND_STOPPED:
        text = f"ended: it was saved and stopped; launch it again to continue (exit code {exit_code})"
        return RunState(RunKind.ENDED, text, exit_code)
    why = "" if last is None else f"; {_incident_text(last)}"
    text = f"ended: it failed, with exit code {exit_code}{why}"
    return RunState(RunKind.ENDED, text, exit_code, ReasonCode.FAILED)


def _incident_text(incident: Incident) -> str:
    return f"its last incident: {incident.reason}"
