"""Converts times of all hosts to the daemon's clock, with which each host's clock is compared repeatedly.

Between two comparisons the offset is interpolated, unless the clock was set in between (by a second, or an hour). Then
a row is moved by the offset before or after the change: the one that puts the row between the two comparisons. If both
do, as can happen after a clock was set back, the order in which the rank wrote its rows decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain_diagnostics.events.tables import Clocks, Int64, TableType, columns_of, num_rows

_TIMES = ("start_ns", "at_ns", "launch_ns")
_MAX_DRIFT = 500e-6
"""Largest drift of a clock that is not set: NTP slews a clock at most at this rate."""
_SLACK_NS = 1_000_000
_FAR_NS = 2**62


@dataclass(frozen=True, slots=True)
class HostClockOffsets:
    """One host's clock: its offsets from the daemon's clock, by era. Between two eras the clock was set."""

    at_ns: tuple[Int64, ...]
    """Times of the comparisons of each era, by the host's clock, ascending."""
    offset_ns: tuple[Int64, ...]
    first_ns: Int64
    """Earliest time of each era by the daemon's clock: the last comparison of the previous era."""
    last_ns: Int64
    """Latest time of each era by the daemon's clock: the first comparison of the next era."""

    @property
    def was_set(self) -> bool:
        return len(self.at_ns) > 1

    def offsets(self, times_ns: Int64) -> Int64:
        """Return the offset to subtract from each time. `times_ns`: times of one rank, in the order of writing."""
        candidates = np.stack(
            [np.interp(times_ns, at, offset) for at, offset in zip(self.at_ns, self.offset_ns, strict=True)]
        ).astype(np.int64)
        if len(candidates) == 1:
            return np.asarray(candidates[0])
        moved = times_ns - candidates
        fits = (moved >= self.first_ns[:, None] - _SLACK_NS) & (moved <= self.last_ns[:, None] + _SLACK_NS)
        eras = self._eras(times_ns, fits, moved)
        return np.asarray(candidates[eras, np.arange(len(times_ns))])

    def _eras(self, times_ns: Int64, fits: NDArray[np.bool_], moved: Int64) -> Int64:
        """Return the era of each row."""
        num_fits = fits.sum(axis=0)
        eras = fits.argmax(axis=0).astype(np.int64)
        nowhere = np.flatnonzero(num_fits == 0)
        if len(nowhere):  # times outside all eras get the nearest era
            miss = np.maximum(self.first_ns[:, None] - moved[:, nowhere], moved[:, nowhere] - self.last_ns[:, None])
            eras[nowhere] = miss.argmin(axis=0)
        doubtful = num_fits > 1
        return self._in_order(times_ns, eras, doubtful, fits) if doubtful.any() else eras

    def _in_order(self, times_ns: Int64, eras: Int64, doubtful: NDArray[np.bool_], fits: NDArray[np.bool_]) -> Int64:
        """Return the eras of all rows, with those of the ambiguous rows resolved.

        An ambiguous row gets the era of the last certain row before it (or the first certain row after it), plus (or
        minus) one for each time that the clock was set back in between.
        """
        jumps = np.zeros(len(times_ns), dtype=np.int64)
        jumps[1:] = np.cumsum(np.diff(times_ns) < -self._smallest_set_back() // 2)
        sure = np.flatnonzero(~doubtful)
        rows = np.flatnonzero(doubtful)
        if len(sure):
            place = np.searchsorted(sure, rows)
            anchors = np.where(place > 0, sure[np.maximum(place - 1, 0)], sure[np.minimum(place, len(sure) - 1)])
            guess = eras[anchors] + jumps[rows] - jumps[anchors]
        else:  # no row is certain: the last rows belong to the last era that fits them
            last = len(fits) - 1 - int(fits[::-1, -1].argmax())
            guess = last - (jumps[-1] - jumps[rows])
        distance = np.abs(np.arange(len(fits))[:, None] - guess[None, :])
        distance[~fits[:, rows]] = len(fits) + _SLACK_NS
        eras = eras.copy()
        eras[rows] = distance.argmin(axis=0)
        return eras

    def _smallest_set_back(self) -> int:
        steps = [int(before[-1] - after[0]) for before, after in zip(self.offset_ns, self.offset_ns[1:], strict=False)]
        return min((step for step in steps if step > 0), default=_FAR_NS)


def host_clocks(clocks: Clocks) -> dict[str, HostClockOffsets]:
    """Return host -> clock, for the hosts with at least one comparison."""
    hosts = clocks.host.astype(str)
    return {str(host): _host_clock(clocks, np.flatnonzero(hosts == host)) for host in np.unique(hosts)}


def align(table: TableType, clocks: Clocks, hosts_of_rank: Mapping[int, str]) -> TableType:
    """Return the table with times by the daemon's clock; rows of hosts without a comparison are unchanged.

    The host of a row is in the column `host`, or else in `hosts_of_rank`. Durations do not change: they are not
    affected by setting a clock.
    """
    names = columns_of(type(table))
    times = [name for name in _TIMES if name in names]
    if not times or isinstance(table, Clocks) or not num_rows(table) or not len(clocks.at_ns):
        return table
    hosts, codes = _hosts(table, hosts_of_rank)
    known = host_clocks(clocks)
    by_host = np.argsort(codes, kind="stable")
    begins = np.searchsorted(codes[by_host], np.arange(len(hosts) + 1))
    offsets = np.zeros(num_rows(table), dtype=np.int64)
    for host, first, end in zip(hosts, begins, begins[1:], strict=False):
        clock = known.get(host)
        if clock is not None:
            rows = by_host[first:end]
            for own in _as_written(table, rows) if clock.was_set else [rows]:
                offsets[own] = clock.offsets(getattr(table, times[0])[own])
    columns: dict[str, Any] = {name: getattr(table, name) - offsets for name in times}
    return replace(table, **columns)


def _host_clock(clocks: Clocks, rows: Int64) -> HostClockOffsets:
    at, offset, error = clocks.at_ns[rows], clocks.offset_ns[rows], clocks.error_ns[rows]
    order = np.argsort(at - offset, kind="stable")  # by the daemon's clock, which is assumed not to be set back
    at, offset, error = at[order], offset[order], error[order]
    true = at - offset
    allowed = error[1:] + error[:-1] + _MAX_DRIFT * np.diff(true) + _SLACK_NS
    begins = np.flatnonzero(np.abs(np.diff(offset)) > allowed) + 1
    parts = np.split(np.arange(len(at)), begins)
    first = [-_FAR_NS, *(int(true[part[0] - 1]) for part in parts[1:])]
    last = [*(int(true[part[-1] + 1]) for part in parts[:-1]), _FAR_NS]
    by_time = [part[np.argsort(at[part], kind="stable")] for part in parts]
    return HostClockOffsets(
        at_ns=tuple(at[part] for part in by_time),
        offset_ns=tuple(offset[part] for part in by_time),
        first_ns=np.array(first, dtype=np.int64),
        last_ns=np.array(last, dtype=np.int64),
    )


def _hosts(table: Any, hosts_of_rank: Mapping[int, str]) -> tuple[list[str], Int64]:
    """Return the distinct host names, and for each row the index of its host."""
    if "host" in columns_of(type(table)):
        names, codes = np.unique(table.host.astype(str), return_inverse=True)
        return [str(name) for name in names], codes
    ranks, inverse = np.unique(table.rank, return_inverse=True)
    names, codes = np.unique([hosts_of_rank.get(int(rank), "") for rank in ranks], return_inverse=True)
    return [str(name) for name in names], codes[inverse]


def _as_written(table: Any, rows: Int64) -> list[Int64]:
    """Return the rows of a host as one array per rank, each in the order of writing."""
    has = columns_of(type(table))
    if "rank" not in has:
        return [rows]
    keys = [getattr(table, name)[rows] for name in ("sequence", "round", "rank") if name in has]
    ordered = rows[np.lexsort(keys)]
    return np.split(ordered, np.flatnonzero(np.diff(table.rank[ordered])) + 1)
