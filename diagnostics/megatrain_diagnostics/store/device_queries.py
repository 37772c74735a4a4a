"""Queries of the tables of GPUs and links: readings of one host, and values of all ranks or hosts per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Float64, Gpus, NetworkLinks, Xids
from megatrain_diagnostics.store.reader import StoredEvents, sql_conditions

_NUM_BACK, _MAX_BACK_CELLS = 2000, 2_000_000
"""Number of earlier steps in which to search for the last reading before the first step; fewer with many ranks."""
_GAPS = 4
"""A reading is valid for at most this many times the median number of steps between readings."""


@dataclass(frozen=True, slots=True, eq=False)
class HostDeviceRows:
    """The readings of a host's devices in an interval of time."""

    gpus: Gpus
    links: NetworkLinks
    xids: Xids


def last_reading_ns(events: StoredEvents, host: str) -> int | None:
    """Return when a host's devices were last read; None if there is no reading. Raises: DataError."""
    where = Where(hosts=(host,))
    found = []
    for kind in (Gpus, NetworkLinks):
        conditions, values = sql_conditions(kind, where)
        table = events.query(kind, where, f"SELECT max(at_ns) FROM segments WHERE {conditions}", values)
        found += [] if table is None else [time_ns for time_ns in table.column(0).to_pylist() if time_ns is not None]
    return max(found, default=None)


def rows_of_host(events: StoredEvents, host: str, first_ns: int, last_ns: int) -> HostDeviceRows:
    """Return the readings of a host from `first_ns` to `last_ns`, inclusive, and all its Xid errors of any time.

    Raises: DataError.
    """
    where = Where(hosts=(host,), first_ns=first_ns, last_ns=last_ns)
    return HostDeviceRows(
        events.read(Gpus, where), events.read(NetworkLinks, where), events.read(Xids, Where(hosts=(host,)))
    )


def gpu_cells(events: StoredEvents, value: str, round_number: int, steps: range, num_ranks: int) -> Float64:
    """Return a value of each rank's GPU, or the largest of several readings. Shape: [steps, ranks]; NaN: no reading.

    `value`: SQL over the columns of the table gpus. Raises: DataError.
    """
    where = _around(round_number, steps, num_ranks)
    conditions, values = sql_conditions(Gpus, where)
    conditions += f" AND rank BETWEEN 0 AND {num_ranks - 1} AND step >= 0"
    sql = (
        f"SELECT rank AS place, step, max(value) AS value FROM (SELECT rank, step, {value} AS value FROM segments"
        f" WHERE {conditions}) WHERE NOT isnan(value) GROUP BY rank, step ORDER BY rank, step"
    )
    return _held(_answer(events, Gpus, where, sql, values), steps, num_ranks)


def link_cells(events: StoredEvents, value: str, round_number: int, steps: range, hosts: Sequence[str]) -> Float64:
    """Return the sum of a value over all links of each host. Shape: [steps, hosts]; NaN: no reading.

    `value`: SQL over the columns of the table links. Raises: DataError.
    """
    where = _around(round_number, steps, len(hosts))
    conditions, values = sql_conditions(NetworkLinks, where)
    sql = (
        f"SELECT host, step, max(value) AS value FROM (SELECT host, max(step) AS step, sum({value}) AS value"
        f" FROM segments WHERE {conditions} AND step >= 0 GROUP BY host, at_ns) GROUP BY host, step"
    )
    found = events.query(NetworkLinks, where, sql, values)
    place = {host: number for number, host in enumerate(hosts)}
    rows = [] if found is None else found.to_pylist()
    readings = sorted((place[row["host"]], row["step"], row["value"]) for row in rows if row["host"] in place)
    return _held(np.array(readings, dtype=np.float64).reshape(-1, 3), steps, len(hosts))


def _around(round_number: int, steps: range, num_places: int) -> Where:
    back = min(_NUM_BACK, _MAX_BACK_CELLS // max(1, num_places))
    return Where((round_number,), max(0, steps[0] - back), steps[-1])


def _answer(events: StoredEvents, kind: type[Gpus], where: Where, sql: str, values: Sequence[Any]) -> Float64:
    found = events.query(kind, where, sql, values)
    if found is None:
        return np.zeros((0, 3))
    return np.stack([found.column(name).to_numpy().astype(np.float64) for name in found.column_names], axis=1)


def _held(readings: Float64, steps: range, num_places: int) -> Float64:
    """Return the value at each step and place. Shape: [steps, places]; NaN: no valid reading.

    `readings`: rows (place, step, value), sorted by place and step. A reading is valid until the next one, but for at
    most _GAPS times the median gap, because a longer gap means that the readings have stopped.
    """
    cells = np.full((len(steps), num_places), np.nan)
    if not len(readings):
        return cells
    place, step = readings[:, 0].astype(np.int64), readings[:, 1].astype(np.int64)
    is_next = np.append(place[1:] == place[:-1], False)
    gaps = np.append(np.diff(step), 0)
    longest = _GAPS * max(1, int(np.median(gaps[is_next]))) if is_next.any() else len(steps)
    end = np.minimum(np.where(is_next, step + gaps, steps.stop), step + longest)
    first, end = np.maximum(step, steps.start), np.minimum(end, steps.stop)
    count = np.maximum(end - first, 0)
    at = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    cells[at - steps.start, np.repeat(place, count)] = np.repeat(readings[:, 2], count)
    return cells
