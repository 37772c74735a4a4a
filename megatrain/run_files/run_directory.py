"""The paths of a run's files, and the names of its ranks' black boxes. Everything below <run> belongs to the run."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatrain.checkpoint_format.claims import CLAIMS_NAME, JobRound
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.files.bounded_files import open_below, read_below
from megatrain.contracts.files.file_locks import is_locked
from megatrain.contracts.files.own_files import check_own_directory
from megatrain.run_files.run_lock import (
    LOCK_FILE,
    UNKNOWN_HOLDER,
    NotOpenedError,
    RunLock,
    claim_run,
    locked_file,
)

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME_LENGTH = 48
_MAX_LOCK_BYTES = 1 << 12


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of one job's run."""

    root: Path

    @property
    def key(self) -> str:
        """Eight characters that distinguish this run from another run of the same job name on the same host."""
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
        """Rank 0's reports, one JSON object per line: docs/guides/metrics.md."""
        return self.metrics / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events"

    @property
    def incidents(self) -> Path:
        return self.root / "incidents"

    @property
    def diagnosis(self) -> Path:
        """The files of the diagnostics daemon, the audit log of user actions, and the changes of the configuration."""
        return self.root / "diagnosis"

    def owns(self, name: str) -> bool:
        """Return whether a run writes a file or directory of this name in the root."""
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
        """Create the missing directories.

        Raises: ConfigError when one cannot be created.
        """
        for directory in (self.checkpoints, self.logs, self.metrics, self.events, self.incidents, self.diagnosis):
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                problem = f"job.run_directory={str(self.root)!r}: cannot create {directory}: {error.strerror}"
                raise ConfigError([f"{problem}; name a directory that can be written"]) from error

    @contextmanager
    def locked(self, job_round: JobRound | None = None) -> Iterator[RunLock]:
        """Keep other jobs from training in this directory until the block ends or a newer round takes over.

        job_round: the round of this process, None without a launcher that counts rounds.
        Raises: when another job has the lock, ConfigError, or FencedError under a launcher, naming its process;
        FencedError when a newer round has taken over; ConfigError when the lock or the claim cannot be written.
        """
        key = f"job.run_directory={str(self.root)!r}"
        try:
            with locked_file(self.root / LOCK_FILE, key, "job.run_directory", job_round) as lock:
                claim = None if job_round is None else claim_run(self.root, key, job_round)
                lock.sign()
                yield RunLock(lock, claim)
        except NotOpenedError as error:
            problem = f"{key}: {error.path} cannot be written: {error.reason}"
            raise ConfigError([f"{problem}; name a directory that can be written"]) from error

    def holder(self) -> str | None:
        """Return the process that trains in the directory, "process 17 on host-3"; None when there is none.

        A process on another host is found only if the file system shares locks between hosts.
        """
        try:
            with open(open_below(self.root, LOCK_FILE), "rb") as file:
                is_held = is_locked(file.fileno())
        except OSError:
            return None
        return (self._last_holder() or UNKNOWN_HOLDER) if is_held else None

    def was_held_here(self) -> bool:
        """Return whether the last process that trained in the directory was on this host."""
        return f" on {socket.gethostname()}," in f"{self._last_holder()},"

    def _last_holder(self) -> str:
        try:
            return read_below(self.root, LOCK_FILE, _MAX_LOCK_BYTES).decode(errors="replace").strip()
        except OSError:
            return ""


def own_box_directory(directory: Path) -> Path:
    """Return the directory of this user's black boxes in telemetry.black_box_directory. Only this user can create files
    there."""
    return directory / f"megatrain-{os.geteuid()}"


def own_box_paths(directory: Path) -> list[Path]:
    """Return the files in this user's directory of black boxes; empty if it is missing or may be another user's."""
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
    """Return the path in `directory` where a rank's black box of a failed round is kept."""
    return directory / f"rank-{rank:05d}.blackbox"


def previous_black_box(path: Path) -> Path:
    """Return the name to which a black box is moved when a new process takes its name."""
    return path.with_name(path.name.removesuffix(".blackbox") + ".previous.blackbox")


def safe_name(name: str) -> str:
    """Return `name` in a form for file names: letters, digits, - and _.

    A changed name gets a hash, so that two names never collide.
    """
    safe = _UNSAFE.sub("_", name)[:_MAX_NAME_LENGTH]
    if safe == name and name:
        return name
    return f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def rank_log_path(host_logs: Path, round_number: int, rank: int) -> Path:
    """Return the path of a rank's log in a round, below <logs>/<host>."""
    return host_logs / f"round-{round_number:06d}" / f"rank-{rank:05d}.log"
