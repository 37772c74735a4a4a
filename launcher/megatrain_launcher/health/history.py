"""This host's earlier measurements. Its speed is compared only with them, because hosts of one job may differ.

Each host has a JSON file with the last samples of each measurement. A damaged file is renamed and a new one begun,
because an unreadable history must not make a host unfit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.files.bounded_files import read_bounded
from megatrain.contracts.files.whole_files import temporary_name
from megatrain.contracts.records.record import decode, encode
from megatrain_launcher.health.context import HealthFinding

MAX_SAMPLES = 32
MAX_NAMES = 512
_MAX_BYTES = 1 << 20
MIN_SAMPLES = 3
"""The fewest samples for a comparison."""


@dataclass(frozen=True, slots=True)
class HealthHistory:
    """`samples`: earlier measurements by name, oldest first; `seen`: the last known value of other facts."""

    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    seen: Mapping[str, float] = field(default_factory=dict)

    def usual(self, name: str) -> float | None:
        """Return the median of the earlier measurements; None if there are fewer than MIN_SAMPLES."""
        values = self.samples.get(name, ())
        return median(values) if len(values) >= MIN_SAMPLES else None

    def with_findings(self, findings: Iterable[HealthFinding]) -> HealthHistory:
        """Return the history with the values of new findings, without samples of checks that did not pass."""
        samples = dict(self.samples)
        seen = dict(self.seen)
        for finding in findings:
            for name, value in finding.seen.items():
                seen.pop(name, None)  # keep the newest last, so that names that no longer occur are dropped first
                seen[name] = value
            if finding.outcome != "passed":
                continue
            for name, value in finding.samples.items():
                samples[name] = (*samples.pop(name, ()), value)[-MAX_SAMPLES:]
        return HealthHistory(dict(list(samples.items())[-MAX_NAMES:]), dict(list(seen.items())[-MAX_NAMES:]))


def read_history(path: Path) -> tuple[HealthHistory, str]:
    """Return the history in a file (empty without a file), and the problem of the file (empty if there is none).

    Raises: OSError when the file exists and cannot be read.
    """
    try:
        raw = read_bounded(path, _MAX_BYTES)
    except FileNotFoundError:
        return HealthHistory(), ""
    try:
        return decode(HealthHistory, raw, str(path)), ""
    except (CoordinationError, UnicodeDecodeError) as error:
        aside = path.with_suffix(".damaged.json")
        with suppress(OSError):
            path.replace(aside)
        return HealthHistory(), f"{error}; put aside as {aside.name}, so a new history begins"


def write_history(path: Path, history: HealthHistory) -> None:
    """Replace the history's file atomically. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(temporary_name(path.name))
    try:
        temporary.write_bytes(encode(history))
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
