"""Reads the progress of this host's ranks in their round from their black boxes.

A black box is used only if its writer is the rank's current process, because a file of the same name may be left from
an earlier launch. After the file is removed, its last content still counts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.reader import BlackBoxReader
from megatrain.contracts.black_box.values import ClockBase, Phase, Progress, Record
from megatrain.contracts.errors import DataError
from megatrain.contracts.records.host_records import Milestones
from megatrain.fencing.fence import interval_of, stop_times

_logger = logging.getLogger(__name__)
_NS = 1_000_000_000
_POLL_RECORDS = 4096
"""A rank's records are searched for the milestones of its start only while it has written at most this many."""


@dataclass(frozen=True, slots=True)
class RankMoments:
    """The time at which a rank reached each milestone, in unix seconds; None: not yet, or not seen."""

    joined: float | None = None
    loaded: float | None = None
    first_step: float | None = None
    resumed_step: int | None = None
    """The number of completed steps from which this rank resumed."""


@dataclass(frozen=True, slots=True)
class RankProgress:
    """A rank's progress from its black box. `is_closed`: the file is gone, so the process has closed its box."""

    rank: int
    progress: Progress
    clock: ClockBase
    moments: RankMoments
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class HostProgress:
    """The combined progress of a host's ranks, as in the host's status."""

    milestones: Milestones
    min_step: int | None = None
    max_step: int | None = None
    resumed_step: int | None = None
    last_step_unix_s: float | None = None
    median_step_s: float | None = None
    step_phase: str = ""
    completed_command: int = 0
    has_stepped: bool = False
    """Whether every rank has completed a step of this round."""
    interval_s: float | None = None
    stop_s: float | None = None
    save_interval_s: float | None = None


def moments_of(records: Sequence[Record], progress: Progress, clock: ClockBase) -> RankMoments:
    """Return the milestones of a rank's start, from its spans; estimated from `progress` if a span is missing."""

    def end_of(operation: Operation) -> float | None:
        for record in records:
            if record.operation == operation and record.is_span and record.duration_ns is not None:
                return clock.unix_of(record.start_ns + record.duration_ns) / _NS
        return None

    has_begun, has_stepped = progress.current_step is not None, progress.completed_ns is not None
    spans = [record for record in records if record.is_span and record.step >= 0]
    steps = [record.step for record in spans if record.operation == Operation.STEP]
    joined = end_of(Operation.INIT)
    if joined is None and progress.phase is not Phase.INIT:
        joined = clock.unix_of(progress.phase_since_ns) / _NS
    loaded = end_of(Operation.CHECKPOINT_LOAD) if has_begun else None
    if loaded is None and progress.step_started_ns is not None:
        loaded = clock.unix_of(progress.step_started_ns) / _NS
    first_step = end_of(Operation.STEP) if has_stepped else None
    if first_step is None and progress.completed_ns is not None:
        first_step = clock.unix_of(progress.completed_ns) / _NS
    return RankMoments(joined, loaded, first_step, min(steps) if steps else progress.current_step)


class RankWatch:
    """Follows the black box of one rank of a round."""

    def __init__(self, path: Path, rank: int, pid: int) -> None:
        self.path = path
        self.rank = rank
        self.pid = pid
        self.latest: RankProgress | None = None
        self._reader: BlackBoxReader | None = None
        self._moments = RankMoments()
        self._has_warned = False

    def poll(self) -> RankProgress | None:
        """Read the rank's black box and return the latest progress; None before a box of the process could be read."""
        if self._reader is None and not self._open():
            return self.latest
        assert self._reader is not None
        try:
            progress = self._reader.progress()
            if self._moments.first_step is None:
                self._moments = self._find_moments(self._reader, progress)
        except DataError as error:
            self._warn(error)
            return self.latest
        is_closed = not self.path.exists()
        self.latest = RankProgress(self.rank, progress, self._reader.clock, self._moments, is_closed)
        return self.latest

    def reader(self) -> BlackBoxReader | None:
        """Return the open black box, None if there is none."""
        return self._reader

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _open(self) -> bool:
        if not self.path.exists():
            return False
        try:
            reader = BlackBoxReader(self.path)
        except DataError as error:
            self._warn(error)
            return False
        if reader.identity.pid != self.pid:
            reader.close()
            return False
        self._reader = reader
        return True

    def _find_moments(self, reader: BlackBoxReader, progress: Progress) -> RankMoments:
        known = self._moments
        is_early = reader.cursor() <= _POLL_RECORDS
        found = moments_of(reader.records_since(0) if is_early else (), progress, reader.clock)
        # keep recorded times: a later poll may only have an estimate
        return RankMoments(
            found.joined if known.joined is None else known.joined,
            found.loaded if known.loaded is None else known.loaded,
            found.first_step,
            found.resumed_step if known.resumed_step is None else known.resumed_step,
        )

    def _warn(self, error: DataError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("rank %d is not watched: %s", self.rank, error)


class RoundProgress:
    """Follows all ranks of this host in one round. Not thread-safe."""

    def __init__(self, paths: Mapping[int, Path], pids: Mapping[int, int], started_unix_s: float) -> None:
        """Follow the ranks of `paths`; `pids`: each rank's process."""
        self.started_unix_s = started_unix_s
        self.watches = {rank: RankWatch(path, rank, pids[rank]) for rank, path in sorted(paths.items())}

    def poll(self) -> dict[int, RankProgress]:
        """Read the black boxes and return each rank's latest progress; ranks without a box are left out."""
        found = {rank: watch.poll() for rank, watch in self.watches.items()}
        return {rank: progress for rank, progress in found.items() if progress is not None}

    def close(self) -> None:
        for watch in self.watches.values():
            with suppress(OSError):
                watch.close()


def host_progress(ranks: Mapping[int, RankProgress], num_ranks: int, started_unix_s: float) -> HostProgress:
    """Return the combined progress of a host's ranks; phase and time of the last step are those of the slowest rank."""
    milestones = Milestones(started_unix_s=started_unix_s)
    found = [ranks[rank] for rank in sorted(ranks)]
    if not found:
        return HostProgress(milestones)
    has_all = len(found) == num_ranks
    moments = [rank.moments for rank in found]
    done = [rank.progress.completed_step for rank in found]
    steps = [step + 1 for step in done if step is not None]
    medians = [rank.progress.median_step_ns for rank in found if rank.progress.median_step_ns is not None]
    intervals = [interval for rank in found if (interval := interval_of(rank.progress)) is not None]
    stops = [times.total_s for rank in found if (times := stop_times(rank.progress)) is not None]
    saves = [rank.progress.save_interval_ns for rank in found if rank.progress.save_interval_ns is not None]
    resumed = [rank_moments.resumed_step for rank_moments in moments if rank_moments.resumed_step is not None]
    has_stepped = has_all and len(steps) == num_ranks
    slowest = min(found, key=lambda rank: (_rank_order(rank.progress), rank.rank))
    completed_ns = slowest.progress.completed_ns
    if has_all:
        milestones = replace(
            milestones,
            joined_unix_s=_latest([rank_moments.joined for rank_moments in moments]),
            loaded_unix_s=_latest([rank_moments.loaded for rank_moments in moments]),
            first_step_unix_s=_latest([rank_moments.first_step for rank_moments in moments]),
        )
    return HostProgress(
        milestones=milestones,
        min_step=min(steps) if has_stepped else None,
        max_step=max(steps, default=None),
        resumed_step=min(resumed, default=None),
        last_step_unix_s=None if completed_ns is None else slowest.clock.unix_of(completed_ns) / _NS,
        median_step_s=max(medians) / _NS if medians else None,
        interval_s=max(intervals, default=None),
        stop_s=max(stops, default=None),
        save_interval_s=max(saves) / _NS if saves else None,
        step_phase=slowest.progress.phase.name.lower().replace("_", "-"),
        completed_command=min(rank.progress.completed_command for rank in found) if has_all else 0,
        has_stepped=has_stepped,
    )


def _rank_order(progress: Progress) -> tuple[int, int]:
    step = -1 if progress.completed_step is None else progress.completed_step
    return step, progress.completed_ns or progress.phase_since_ns


def _latest(times: Sequence[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return max(known) if len(known) == len(times) else None
