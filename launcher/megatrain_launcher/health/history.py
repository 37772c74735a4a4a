"""What this host measured before: the only fair standard for its speed, because hosts of one job may differ.

One small JSON file a host. Bounded: the last samples of each measurement. A file that is damaged is put aside and a new
one begun, for a host must not be refused over its own notes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from megatrain.contracts.bounded_files import read_bounded
from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.record import decode, encode
from megatrain.contracts.whole_files import temporary_name
from megatrain_launcher.health.finding import Finding

MAX_SAMPLES = 32
MAX_NAMES = 512
_MOST_BYTES = 1 << 20
MIN_SAMPLES = 3
"""Fewer say nothing about what is usual."""


@dataclass(frozen=True, slots=True)
class History:
    """Measurements of before, the oldest first, and facts as they were seen last."""

    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    seen: Mapping[str, float] = field(default_factory=dict)

    def usual(self, name: str) -> float | None:
        """Return the median of what was measured before, None while that is too little."""
        values = self.samples.get(name, ())
        return median(values) if len(values) >= MIN_SAMPLES else None

    def with_findings(self, findings: Iterable[Finding]) -> History:
        """Return the history with what new findings say; samples of checks that did not pass are left out."""
        samples = dict(self.samples)
        seen = dict(self.seen)
        for finding in findings:
            for name, value in finding.seen.items():
                seen.pop(name, None)  # the newest last: what is not met any more goes first
                seen[name] = value
            if finding.outcome != "passed":
                continue
            for name, value in finding.samples.items():
                samples[name] = (*samples.pop(name, ()), value)[-MAX_SAMPLES:]
        return History(dict(list(samples.items())[-MAX_NAMES:]), dict(list(seen.items())[-MAX_NAMES:]))


def read_history(path: Path) -> tuple[History, str]:
    """Return the history in a file, empty where there is none, and what is wrong with the file.

    Raises: OSError when it is there and cannot be read.
    """
    try:
        raw = read_bounded(path, _MOST_BYTES)
    except FileNotFoundError:
        return History(), ""
    try:
        return decode(History, raw, str(path)), ""
    except (CoordinationError, UnicodeDecodeError) as error:
        aside = path.with_suffix(".damaged.json")
        with suppress(OSError):
            path.replace(aside)
        return History(), f"{error}; put aside as {aside.name}, a new history begins"


def write_history(path: Path, history: History) -> None:
    """Put the history in place whole. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(temporary_name(path.name))
    try:
        temporary.write_bytes(encode(history))
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
