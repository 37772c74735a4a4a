"""Where a run keeps its files, and what its ranks' black boxes are called. Everything below <run> is the run's own."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatrain.contracts.bounded_files import open_below, read_below
from megatrain.contracts.claims import CLAIMS_NAME, JobRound
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.own_files import check_own_directory
from megatrain.contracts.run_hold import (
    LOCK_FILE,
    UNKNOWN_HOLDER,
    NotOpenedError,
    RunHold,
    claim_run,
    hold,
)

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME_LENGTH = 48
_MOST_LOCK_BYTES = 1 << 12


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of one job's run."""

    root: Path

    @property
    def key(self) -> str:
        """Eight characters that tell this run from another one of the same job name on the same host."""
        return hashlib.sha256(str(self.root.absolute()).encode()).hexdigest()[:8]

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics"

    @property
    def metrics_file(self) -> Path:
        """What rank 0 reports, a JSON object a line: docs/guides/metrics.md."""
        return self.metrics / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events"

    @property
    def incidents(self) -> Path:
        return self.root / "incidents"

    @property
    def diagnosis(self) -> Path:
        """What the diagnostics daemon tells of itself and of its judgement."""
        return self.root / "diagnosis"

    def owns(self, name: str) -> bool:
        """Return whether an entry of this name in the root is one that runs write."""
        return name in {
            "checkpoints",
            "coordination",
            "logs",
            "metrics",
            "diagnosis",
            "events",
            "hosts",
            "incidents",
            "config.toml",
            LOCK_FILE,
            CLAIMS_NAME,
        }

    def create(self) -> None:
        """Make the directories that are not there yet.

        Raises: ConfigError when one cannot be made.
        """
        for directory in (self.checkpoints, self.logs, self.metrics, self.events, self.incidents, self.diagnosis):
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                problem = f"job.run_directory={str(self.root)!r}: cannot create {directory}: {error.strerror}"
                raise ConfigError([f"{problem}; name a directory that can be written"]) from error

    @contextmanager
    def held(self, job_round: JobRound | None = None) -> Iterator[RunHold]:
        """Keep others from training in this directory: until this process ends, or a newer round takes it over.

        job_round: the round of this process, None without a launcher that counts them.
        Raises: ConfigError naming the process that holds it, or why it cannot be held; under a launcher FencedError in
        place of the first.
        """
        key = f"job.run_directory={str(self.root)!r}"
        try:
            with hold(self.root / LOCK_FILE, key, "job.run_directory", job_round) as lock:
                claim = None if job_round is None else claim_run(self.root, key, job_round)
                lock.sign()
                yield RunHold(lock, claim)
        except NotOpenedError as error:
            problem = f"{key}: {error.path} cannot be written: {error.reason}"
            raise ConfigError([f"{problem}; name a directory that can be written"]) from error

    def holder(self) -> str | None:
        """Return who trains in the directory, "process 17 on host-3"; None when no process does.

        Whether a process on another host is seen is up to the file system.
        """
        try:
            with open(open_below(self.root, LOCK_FILE), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._last_holder() or UNKNOWN_HOLDER
        except OSError:
            return None
        return None

    def was_held_here(self) -> bool:
        """Say whether it was a process of this host that trained in the directory last."""
        return f" on {socket.gethostname()}," in f"{self._last_holder()},"

    def _last_holder(self) -> str:
        try:
            return read_below(self.root, LOCK_FILE, _MOST_LOCK_BYTES).decode(errors="replace").strip()
        except OSError:
            return ""


def own_box_directory(directory: Path) -> Path:
    """Return where this user's black boxes lie in telemetry.black_box_directory: other users cannot make files
    there."""
    return directory / f"megatrain-{os.geteuid()}"


def own_box_paths(directory: Path) -> list[Path]:
    """Return what lies in this user's directory of black boxes; nothing where that is missing, or may be another's."""
    own = own_box_directory(directory)
    try:
        check_own_directory(own)
        return sorted(own.iterdir())
    except OSError:
        return []


def black_box_path(directory: Path, job: str, run_key: str, branch: str, round_number: int, rank: int) -> Path:
    """Return the file of one rank's black box in one round of a job.

    `directory`: telemetry.black_box_directory; `run_key`: see RunDirectory.key.
    """
    # A dot separates the parts and occurs in none of them.
    names = ".".join(safe_name(name) for name in (job, run_key, branch))
    return own_box_directory(directory) / f"megatrain.{names}.{round_number:06d}.rank-{rank:05d}.blackbox"


def kept_black_box(directory: Path, rank: int) -> Path:
    """Return where a rank's black box is kept in `directory`, that of a round that broke."""
    return directory / f"rank-{rank:05d}.blackbox"


def previous_black_box(path: Path) -> Path:
    """Return where a black box is set aside when a new process takes its name."""
    return path.with_name(path.name.removesuffix(".blackbox") + ".previous.blackbox")


def safe_name(name: str) -> str:
    """Return `name` as a part of a file name: made of letters, digits, - and _.

    What had to change gets a hash, so that no two names meet.
    """
    safe = _UNSAFE.sub("_", name)[:_MAX_NAME_LENGTH]
    if safe == name and name:
        return name
    return f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def rank_log_path(host_logs: Path, round_number: int, rank: int) -> Path:
    """Return where the log of a rank in a round lies, below <logs>/<host>."""
    return host_logs / f"round-{round_number:06d}" / f"rank-{rank:05d}.log"
