"""The state that the running daemon writes to <run>/diagnosis/state.json, for the dashboard; replaced atomically.

It has findings, scores, silent ranks, and numbers of refused and dropped rows. Readers must work without the file: a
missing, damaged or foreign file means that the daemon has published nothing. Scores of all ranks are little-endian
32-bit floats in base64: 12,288 scores take 64 kB.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.files.bounded_files import read_bounded
from megatrain.contracts.files.whole_files import temporary_name
from megatrain.contracts.records.record import decode, encode
from megatrain_diagnostics.analysis.findings import Finding, Thresholds

STATE_NAME = "state.json"
MAX_BYTES = 32 << 20
"""Readers refuse a larger file. The state of the largest job is much smaller."""
_MAX_FINDINGS = 100
_MAX_RANK = 1 << 24
_FLOATS = np.dtype("<f4")

Scores = NDArray[np.float32]
Ranges = tuple[tuple[int, ...], ...]
"""Ranks as (first, count)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonState:
    """The daemon's results at `written_unix_s`. `step`: the newest step in which ranks were compared."""

    job: str
    session: str
    """Identifies this daemon process, as in its record in etcd."""
    written_unix_s: float
    round: int = -1
    """The round that is being analyzed; -1: no rank has sent anything."""
    step: int | None = None
    rank_scores: str = ""
    """Scores of all ranks, encoded as `scores_text` does; decoded by `scores`."""
    host_scores: Mapping[str, float] = field(default_factory=dict)
    """By host, from analysis/live.py."""
    thresholds: Thresholds | None = None
    """Least values for which a rank is a straggler."""
    findings: tuple[Finding, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    num_steps: int = 0
    is_enough: bool = False
    silent: Ranges = ()
    without_peers: Ranges = ()
    refused_rows: Mapping[str, int] = field(default_factory=dict)
    """By reason; a batch that was refused entirely counts as one row."""
    dropped_rows: int = 0
    """Rows that hosts dropped before they were sent."""
    connected_hosts: tuple[str, ...] = ()
    problem: str = ""
    """The reason why nothing can be stored; empty when storing works."""

    def scores(self) -> Scores:
        """Return the straggler score of each rank, without NaN; empty if ranks were not compared yet."""
        try:
            raw = base64.b64decode(self.rank_scores, validate=True)
            found = np.frombuffer(raw, dtype=_FLOATS)
        except (binascii.Error, ValueError):
            return np.zeros(0, dtype=np.float32)
        return np.nan_to_num(found.astype(np.float32), nan=0.0)

    @property
    def silent_ranks(self) -> tuple[int, ...]:
        return ranks_of(self.silent)

    @property
    def ranks_without_peers(self) -> tuple[int, ...]:
        return ranks_of(self.without_peers)


def scores_text(scores: Iterable[float]) -> str:
    """Encode the scores of all ranks, in their order, for `DaemonState.rank_scores`."""
    return base64.b64encode(np.asarray(list(scores), dtype=_FLOATS).tobytes()).decode()


def ranges_of(ranks: Iterable[int]) -> Ranges:
    """Return ranks as (first, count)."""
    found: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if found and rank == found[-1][0] + found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([rank, 1])
    return tuple((first, count) for first, count in found)


def ranks_of(ranges: Ranges) -> tuple[int, ...]:
    """Return the ranks in ranges; empty if any range is invalid."""
    if any(len(bounds) != 2 or bounds[0] < 0 or not 0 < bounds[1] <= _MAX_RANK for bounds in ranges):
        return ()
    if sum(bounds[1] for bounds in ranges) > _MAX_RANK:
        return ()
    return tuple(rank for first, count in ranges for rank in range(first, first + count))


def storable(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the first hundred findings whose numbers are all finite, because JSON has no NaN or infinity."""
    return tuple(finding for finding in findings if all(map(math.isfinite, _figures(finding))))[:_MAX_FINDINGS]


def _figures(finding: Finding) -> tuple[float, ...]:
    return (
        finding.excess,
        finding.excess_s,
        finding.score,
        finding.wait_deficit_s,
        finding.step_s,
        finding.gain_s,
        *finding.scores.values(),
        *finding.rank_scores,
    )


def write_state(directory: Path, state: DaemonState) -> None:
    """Replace the state file atomically, without fsync: a power failure may lose it. Raises: OSError."""
    draft = directory / temporary_name(STATE_NAME)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        draft.write_bytes(encode(state))
        os.replace(draft, directory / STATE_NAME)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def read_state(directory: Path) -> tuple[DaemonState | None, str]:
    """Return the daemon's last state and why it cannot be read ("": no problem); None without a readable state."""
    path = directory / STATE_NAME
    try:
        raw = read_bounded(path, MAX_BYTES)
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{path}: cannot be read: {error.strerror or error}"
    try:
        return decode(DaemonState, raw, str(path)), ""
    except CoordinationError as error:
        return None, str(error)
