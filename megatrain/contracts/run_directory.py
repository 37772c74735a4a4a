"""Where a run keeps its files, and what its ranks' black boxes are called. Everything below <run> is the run's own."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from megatrain.contracts.errors import ConfigError

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME_LENGTH = 48


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of one job's run."""

    root: Path

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
    def events(self) -> Path:
        return self.root / "events"

    @property
    def incidents(self) -> Path:
        return self.root / "incidents"

    def create(self) -> None:
        """Make the directories that are not there yet.

        Raises: ConfigError when one cannot be made.
        """
        for directory in (self.checkpoints, self.logs, self.metrics, self.events, self.incidents):
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                problem = f"job.run_directory={str(self.root)!r}: cannot create {directory}: {error.strerror}"
                raise ConfigError([f"{problem}; name a directory that can be written"]) from error


def black_box_path(directory: Path, job: str, branch: str, incarnation: int, rank: int) -> Path:
    """Return the file of one rank's black box in one incarnation of a job."""
    # A dot separates the parts and occurs in none of them.
    name = f"megatrain.{_safe(job)}.{_safe(branch)}.{incarnation:06d}.rank-{rank:05d}.blackbox"
    return directory / name


def _safe(name: str) -> str:
    """Return `name` made of letters, digits, - and _; what had to change gets a hash, so that no two names meet."""
    safe = _UNSAFE.sub("_", name)[:_MAX_NAME_LENGTH]
    if safe == name and name:
        return name
    return f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
