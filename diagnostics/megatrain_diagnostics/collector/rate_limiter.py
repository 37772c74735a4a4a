"""Limits the rows of each rank by a token bucket, so that a rank that writes without limit does not affect the others.

Time is that of the batches, not of their arrival: rows that a spool held back for ten minutes pass.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAX_BUCKETS = 100_000


@dataclass(slots=True)
class _Bucket:
    rows: float
    made_unix_ns: int


class RowRateLimiter:
    """`rows_per_s` are sustained, `burst_rows` at once: a whole black box, around an incident. For one thread."""

    def __init__(self, rows_per_s: float = 20_000, burst_rows: int = 400_000) -> None:
        self._rows_per_s, self._burst_rows = rows_per_s, burst_rows
        self._buckets: OrderedDict[tuple[str, int], _Bucket] = OrderedDict()

    def let_through(
        self, host: str, ranks: NDArray[np.signedinteger[Any]], made_unix_ns: int
    ) -> NDArray[np.bool_] | None:
        """Return the mask of the rows that may pass, the first ones of each rank; None: all of them."""
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
        # a clock that was set back refills nothing, and its new time is the base from then on
        elapsed_s = max(0, made_unix_ns - bucket.made_unix_ns) / 1e9
        rows = min(float(self._burst_rows), bucket.rows + elapsed_s * self._rows_per_s)
        allowed = min(count, int(rows))
        bucket.rows, bucket.made_unix_ns = rows - allowed, made_unix_ns
        while len(self._buckets) > _MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return allowed
