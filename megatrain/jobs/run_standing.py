"""How a run is whose etcd does not answer, by what its directory tells: ended, killed, out of reach, never started.

The launch that brings a run's own etcd holds <run>/coordination/lock as long as it lives, and leaves
<run>/coordination/exit-code when it ends. So a lock that nobody holds without that file is of a launch that was killed.
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatrain.contracts.bounded_files import open_below, read_below
from megatrain.contracts.checkpoint_files import committed_steps
from megatrain.contracts.errors import CheckpointError, CoordinationError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.incident import Incident
from megatrain.contracts.lineage import list_branches
from megatrain.contracts.location import LocalLocation
from megatrain.contracts.run_directory import RunDirectory
from megatrain.jobs.health import Health, Reason, ReasonCode, health_of
from megatrain.jobs.own_etcd import PLACE
from megatrain.jobs.recorded_incidents import read_incident

EXIT_CODE_FILE = f"{PLACE}/exit-code"
_LOCK_FILE = f"{PLACE}/lock"
_MOST_BYTES = 1 << 12
_MOST_DIGITS = 3


class RunKind(StrEnum):
    """How a run is, as far as somebody who asks for it needs to know."""

    RUNNING = "running"
    """Its etcd answers, and hosts are registered."""
    ENDED = "ended"
    KILLED = "killed"
    """Its launch is gone, and nobody has written how it ended."""
    UNREACHABLE = "unreachable"
    """Its etcd does not answer, and nothing proves that it is over."""
    NEVER_STARTED = "never started"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the directory of a run tells. `holder`: who holds the lock of a launch, or held it last."""

    is_run: bool
    exit_code: int | None = None
    has_launch: bool = False
    """A launch with an etcd of its own was here."""
    is_held: bool = False
    """Somebody of it lives."""
    holder: str = ""
    is_of_here: bool = True
    """The last holder was a process of this machine: a lock that is free says that it is gone."""


@dataclass(frozen=True, slots=True)
class RunStanding:
    """The answer where etcd gives none."""

    kind: RunKind
    headline: str
    exit_code: int | None = None

    @property
    def health(self) -> Health:
        """What that means for whoever is responsible for the run; of one that ended in order, nothing."""
        if self.kind is RunKind.UNREACHABLE:
            return health_of([Reason(ReasonCode.UNREACHABLE, self.headline)])
        if self.kind is RunKind.KILLED:
            return health_of([Reason(ReasonCode.NOT_RUNNING, self.headline)])
        if self.kind is RunKind.ENDED and self.exit_code not in (ExitCode.OK, ExitCode.SAVED_AND_STOPPED):
            return health_of([Reason(ReasonCode.FAILED, self.headline)])
        return Health()


def run_standing(facts: RunFacts) -> RunStanding:
    """Return what the facts of a run's directory mean. Pure."""
    who = f" ({facts.holder})" if facts.holder else ""
    if not facts.is_run:
        return RunStanding(RunKind.NEVER_STARTED, "never started: no launch has left anything there")
    if facts.is_held:
        text = f"unreachable: its launch{who} lives, and its etcd does not answer"
        return RunStanding(RunKind.UNREACHABLE, text)
    if facts.exit_code is not None:
        return RunStanding(RunKind.ENDED, f"ended: {_end_text(facts.exit_code)}", facts.exit_code)
    if facts.has_launch and facts.is_of_here:
        text = f"killed: its launch{who} is gone, and nobody has written how the job ended; launch it again to go on"
        return RunStanding(RunKind.KILLED, text)
    if facts.has_launch:
        text = f"unreachable: its etcd does not answer, and whether its launch{who} lives cannot be seen from here"
        return RunStanding(RunKind.UNREACHABLE, text)
    text = "unreachable: it was launched with an etcd elsewhere; say --rdzv-endpoint as the launch did"
    return RunStanding(RunKind.UNREACHABLE, text)


def read_facts(run: Path) -> RunFacts:
    """Return what the directory of a run tells. Whoever sends a directory cannot make this read another place."""
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
    """Return the exit code that the last launch left, None where there is none."""
    text = _text(run, EXIT_CODE_FILE)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


@dataclass(frozen=True, slots=True)
class LastKnown:
    """What a run's directory has of the job as it was: its newest checkpoint and incident."""

    saved_step: int | None = None
    saved_unix_s: float | None = None
    incident: Incident | None = None


def read_last_known(run: Path) -> LastKnown:
    """Return the newest checkpoint and incident below a run's directory; what cannot be read is left out."""
    own = RunDirectory(run)
    saved: tuple[float, int] | None = None
    with suppress(CheckpointError, OSError):
        for branch in list_branches(LocalLocation(own.checkpoints)):
            place = own.checkpoints / branch.name
            for step in committed_steps(LocalLocation(place))[-1:]:
                found = (place.stat().st_mtime, step)
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
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _text(run: Path, name: str) -> str:
    try:
        return read_below(run, name, _MOST_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return ""


def _end_text(exit_code: int) -> str:
    if exit_code == ExitCode.OK:
        return "it finished (exit code 0)"
    if exit_code == ExitCode.SAVED_AND_STOPPED:
        return f"it was saved and stopped, launch it again to go on (exit code {exit_code})"
    return f"it failed, with exit code {exit_code}"
