"""Reads the records of a black box as they end, many at once: the ring's bytes are viewed as a numpy array.

A record is returned when it is complete and has ended. A record that is still open, or was read while it was being
written, is read again at the next poll. So a poll reads only new and open records, not the whole ring.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.black_box.encoding import NO_VALUE
from megatrain.contracts.black_box.reader import BlackBoxReader
from megatrain.contracts.errors import DataError

RECORD = np.dtype(
    [
        ("sequence", "<u8"),
        ("start_ns", "<u8"),
        ("duration_ns", "<u8"),
        ("launch_ns", "<u8"),
        ("num_bytes", "<u8"),
        ("step", "<i4"),
        ("collective_sequence", "<u4"),
        ("microbatch", "<i4"),
        ("chunk", "<i2"),
        ("operation", "<u2"),
        ("group", "<u2"),
        ("flags", "<u2"),
        ("check", "<u4"),
    ]
)
"""The layout of contracts.black_box.encoding.RECORD."""
_LOOK_AHEAD = 16
"""Number of slots to read after the cursor, which may lag behind when several threads record."""
_LOW_32 = np.uint64(2**32 - 1)
_MAX_RECORDS = 2**62

Records = NDArray[np.void]


class RingPoll(NamedTuple):
    """The result of one poll. `num_lost` records were overwritten before they could be returned."""

    ended: Records
    num_lost: int


class RingTail:
    """Reads one ring, starting after record `last`. All methods raise DataError if the reader does."""

    def __init__(self, reader: BlackBoxReader, last: int = 0) -> None:
        self._reader = reader
        self._open = np.empty(0, dtype=np.int64)
        """Numbers of records that were started and not yet returned, ascending."""
        self.last = last
        """Number of the newest record that was started."""

    @property
    def done(self) -> int:
        """Return the number up to which all records were returned or lost: a new RingTail can start there."""
        return int(self._open[0]) - 1 if len(self._open) else self.last

    def poll(self, cursor: int) -> RingPoll:
        """Return the records up to about `cursor` that have ended since the last poll. Raises: DataError."""
        capacity = self._reader.capacity
        if cursor > _MAX_RECORDS:
            raise DataError(f"{self._reader.path}: {cursor} records are more than a rank can write")
        first = max(self.last + 1, cursor - capacity + 1)
        num_lost = first - self.last - 1
        old = [_ended(self._again(run)) for run in _runs(self._open)]
        new = self._whole(first, min(capacity, max(0, cursor - first + 1) + _LOOK_AHEAD))
        newest = max(self.last, cursor, int(new["sequence"][-1]) if len(new) else 0)
        new = _ended(new)
        has_ended = np.zeros(newest - first + 1, dtype=bool)
        has_ended[new["sequence"].astype(np.int64) - first] = True
        closed = {number for part in old for number in part["sequence"].tolist()}
        waiting = np.array([number for number in self._open.tolist() if number not in closed], dtype=np.int64)
        still = np.concatenate([waiting, first + np.flatnonzero(~has_ended)])
        kept = still > newest - capacity
        self._open, self.last = still[kept], newest
        return RingPoll(np.concatenate([*old, new]) if old else new, num_lost + int((~kept).sum()))

    def newest(self, count: int) -> Records:
        """Return the newest `count` records in the ring: ended or open, and also those already returned."""
        capacity = self._reader.capacity
        first = max(1, self.last - min(count, capacity) + 1)
        return self._whole(first, max(0, self.last - first + 1))

    def _again(self, run: NDArray[np.int64]) -> Records:
        return self._whole(int(run[0]), len(run))

    def _whole(self, first: int, count: int) -> Records:
        """Return the completely written records among the records first, ..., first + count - 1."""
        copies = self._reader.slot_copies(first % self._reader.capacity, count)
        copy, later = (np.frombuffer(raw, dtype=RECORD) for raw in copies)
        wanted = np.arange(first, first + count, dtype=np.uint64)
        is_whole = (copy["sequence"] == wanted) & (later["sequence"] == wanted) & (copy["check"] == wanted & _LOW_32)
        records: Records = copy[is_whole]
        return records


def _ended(records: Records) -> Records:
    ended: Records = records[records["duration_ns"] != NO_VALUE]
    return ended


def _runs(numbers: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the runs of consecutive numbers, each of which is read at once."""
    if not len(numbers):
        return []
    return np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
