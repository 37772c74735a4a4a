"""Checks which rows of a batch are valid: an invalid row is removed and counted by reason; other rows are kept.

Later stages do not repeat these checks: rows in the store have existing ranks, and durations and counts so small that
sums do not overflow. Rows of a round that has ended are stored but not analyzed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megatrain.contracts.black_box.operations import MAX_OPERATIONS
from megatrain.contracts.errors import DataError
from megatrain.contracts.layout import SIZED_AXES
from megatrain_diagnostics.collector.counters import RejectionReason
from megatrain_diagnostics.collector.rounds_known import MAX_RANKS, KnownRounds
from megatrain_diagnostics.columns.schema import table_named, time_column, to_arrow
from megatrain_diagnostics.events.roster import world_sizes
from megatrain_diagnostics.events.tables import DEVICE_TABLES, Flags, Ranks, Table, columns_of, num_rows, select
from megatrain_diagnostics.wire.messages import BatchHeader, read_batch

_FUTURE_NS = 3_600 * 10**9
_LONGEST_NS = 2**60
_LAST_NS = 2**62
_LARGE = 2**62
_BOUNDS: Mapping[str, tuple[int, int]] = {
    "round": (0, 2**31 - 1),
    "rank": (0, MAX_RANKS - 1),
    "sequence": (0, _LARGE),
    "step": (-1, 2**31 - 1),
    "microbatch": (-1, 2**31 - 1),
    "chunk": (-1, 2**15 - 1),
    "group": (0, 2**15 - 1),
    "collective": (0, _LARGE),
    "start_ns": (0, _LAST_NS),
    "at_ns": (0, _LAST_NS),
    "launch_ns": (0, _LAST_NS),
    "duration_ns": (-1, _LONGEST_NS),
    "sum_ns": (0, _LONGEST_NS),
    "max_ns": (0, _LONGEST_NS),
    "count": (0, 2**31 - 1),
    "num_bytes": (0, _LARGE),
    "flags": (0, 2**15 - 1),
    "pid": (0, _LARGE),
    **{axis.rank_name: (0, MAX_RANKS - 1) for axis in SIZED_AXES},
    **{axis.size_name: (1, MAX_RANKS) for axis in SIZED_AXES},
    "first_rank": (0, MAX_RANKS - 1),
    "stride": (-MAX_RANKS, MAX_RANKS),
    "num_ranks": (0, MAX_RANKS),
    "error_ns": (0, _LARGE),
    "offset_ns": (-_LARGE, _LARGE),
}
"""Inclusive bounds of each integer column."""
_DEVICE_BOUNDS: Mapping[str, tuple[int, int]] = {
    **_BOUNDS,
    "round": (-1, 2**31 - 1),
    "rank": (-1, MAX_RANKS - 1),
    "gpu": (-1, 4096),
    "xid": (0, 2**31 - 1),
}
"""Bounds in device tables, where -1 means: the host has no round yet, or the GPU has no rank."""

_MAX_BUCKETS = 100_000


class RefusedBatchError(Exception):
    """A batch without any usable row."""

    def __init__(self, reason: RejectionReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Admitted:
    """The valid rows of a batch: `stored` has all of them, `live` those to be analyzed."""

    kind: type[Table]
    stored: pa.RecordBatch
    live: Table
    """The rows of rounds that have not ended, and all rows about devices."""
    refused: Mapping[RejectionReason, int]
    old_rows: int


class Admission:
    """Checks batches. For one thread at a time."""

    def __init__(self, rounds: KnownRounds, limiter: RowRateLimiter) -> None:
        self._rounds, self._limiter = rounds, limiter

    def admit(self, host: str, header: BatchHeader, content: pa.Buffer) -> Admitted:
        """Return the valid rows of a batch. Raises: RefusedBatchError for an unknown table or an unreadable batch."""
        kind: Any = table_named(header.table)
        if kind is None:
            raise RefusedBatchError(RejectionReason.UNKNOWN_TABLE, f"table {header.table[:40]!r}")
        try:
            batch, table = read_batch(kind, content)
        except DataError as error:
            raise RefusedBatchError(RejectionReason.NO_BATCH, str(error)[:300]) from error
        masks = {
            RejectionReason.FOREIGN_HOST: _of_host(table, host),
            RejectionReason.OUT_OF_RANGE: self._in_range(table),
            RejectionReason.FROM_THE_FUTURE: _at_most(table, time_column(kind), header.made_unix_ns + _FUTURE_NS),
            RejectionReason.UNKNOWN_ROUND: _at_most(table, "round", self._rounds.latest_possible),
        }
        kept = np.ones(num_rows(table), dtype=bool)
        refused: dict[RejectionReason, int] = {}
        for reason, mask in masks.items():
            _narrow(kept, mask, reason, refused)
        if "rank" in columns_of(kind):
            _narrow(kept, self._within_rate(host, table, kept, header), RejectionReason.FLOOD, refused)
        if refused:
            table = _selected(table, kept)
            batch = to_arrow(table)
        live = self._live(table)
        return Admitted(kind, batch, live, refused, num_rows(table) - num_rows(live))

    def _in_range(self, table: Table) -> Flags:
        good = np.ones(num_rows(table), dtype=bool)
        bounds = _DEVICE_BOUNDS if isinstance(table, DEVICE_TABLES) else _BOUNDS
        for name in columns_of(type(table)):
            if name in bounds:
                values = _column(table, name)
                least, most = bounds[name]
                # most batches are valid: checking minimum and maximum is cheaper than a mask per column
                if len(values) and (values.min() < least or values.max() > most):
                    good &= (values >= least) & (values <= most)
        if "operation" in columns_of(type(table)):
            good &= _column(table, "operation") < MAX_OPERATIONS
        if "rank" in columns_of(type(table)):
            self._check_ranks(table, good)
        return good

    def _check_ranks(self, table: Table, good: Flags) -> None:
        """Restrict `good` to ranks that exist in their round, and to layouts of the round's world size."""
        rounds, ranks = _column(table, "round"), _column(table, "rank")
        sizes = self._rounds.world_sizes()
        for round_number in np.unique(rounds):
            size = sizes.get(int(round_number))
            if size is not None:
                good &= (rounds != round_number) | (ranks < size)
                if isinstance(table, Ranks):
                    good &= (rounds != round_number) | (world_sizes(table) == size)
        if isinstance(table, Ranks):
            for axis in SIZED_AXES:
                good &= _column(table, axis.rank_name) < _column(table, axis.size_name)

    def _within_rate(self, host: str, table: Table, kept: Flags, header: BatchHeader) -> Flags | None:
        rows = np.flatnonzero(kept)
        passed = self._limiter.let_through(host, _column(table, "rank")[rows], header.made_unix_ns)
        if passed is None:
            return None
        mask = np.ones(len(kept), dtype=bool)
        mask[rows[~passed]] = False
        return mask

    def _live(self, table: Table) -> Table:
        if "round" not in columns_of(type(table)) or isinstance(table, DEVICE_TABLES):
            return table  # device rows of all rounds are analyzed: a broken GPU matters in any round
        if isinstance(table, Ranks):
            self._rounds.add_ranks(table)
        is_live = _column(table, "round") >= self._rounds.newest
        return table if is_live.all() else _selected(table, is_live)


def _of_host(table: Table, host: str) -> Flags | None:
    if "host" not in columns_of(type(table)):
        return None
    return np.asarray(getattr(table, "host") == host, dtype=bool)  # noqa: B009 -- not every table has it


def _at_most(table: Table, column: str | None, most: int) -> Flags | None:
    if column is None or column not in columns_of(type(table)):
        return None
    return np.asarray(_column(table, column) <= most, dtype=bool)


def _selected(table: Any, rows: Flags) -> Table:
    chosen: Table = select(table, rows)
    return chosen


def _narrow(kept: Flags, mask: Flags | None, reason: RejectionReason, refused: dict[RejectionReason, int]) -> None:
    """Remove the rows outside `mask` from `kept`, and count under `reason` those that were still kept."""
    if mask is None:
        return
    lost = int(np.count_nonzero(kept & ~mask))
    if lost:
        refused[reason] = lost
        kept &= mask


def _column(table: Table, name: str) -> NDArray[np.int64]:
    values: NDArray[np.int64] = getattr(table, name)
    return values


@dataclass(slots=True)
class _Bucket:
    rows: float
    made_unix_ns: int


class RowRateLimiter:
    """Limits the rows of each rank by a token bucket, so that a rank with too many rows does not affect other ranks.

    `rows_per_s` is the sustained rate, `burst_rows` the burst: all records of a black box, sent around an incident.
    The rate is measured by the times when batches were made, not when they arrived, so rows that a spool held for ten
    minutes pass. For one thread.
    """

    def __init__(self, rows_per_s: float = 20_000, burst_rows: int = 400_000) -> None:
        self._rows_per_s, self._burst_rows = rows_per_s, burst_rows
        self._buckets: OrderedDict[tuple[str, int], _Bucket] = OrderedDict()

    def let_through(
        self, host: str, ranks: NDArray[np.signedinteger[Any]], made_unix_ns: int
    ) -> NDArray[np.bool_] | None:
        """Return the mask of the rows that may pass, the first rows of each rank; None: all rows may pass."""
        passed: NDArray[np.bool_] | None = None
        for rank, count in zip(*np.unique(ranks, return_counts=True), strict=True):
            allowed = self._take(host, int(rank), int(count), made_unix_ns)
            if allowed < count:
                passed = np.ones(len(ranks), dtype=bool) if passed is None else passed
                passed[np.flatnonzero(ranks == rank)[allowed:]] = False
        return passed

    def _take(self, host: str, rank: int, count: int, made_unix_ns: int) -> int:
        bucket = self._buckets.setdefault((host, rank), _Bucket(float(self._burst_rows), made_unix_ns))
        self._buckets.move_to_end((host, rank))
        # after a clock was set back nothing is refilled; later times are compared with the new time
        elapsed_s = max(0, made_unix_ns - bucket.made_unix_ns) / 1e9
        rows = min(float(self._burst_rows), bucket.rows + elapsed_s * self._rows_per_s)
        allowed = min(count, int(rows))
        bucket.rows, bucket.made_unix_ns = rows - allowed, made_unix_ns
        while len(self._buckets) > _MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return allowed
