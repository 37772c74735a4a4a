"""Reads the black box of one rank in one round: each poll returns the new content as tables.

The file stays open after its name is removed, so that the last records of a rank are read even after the executor has
copied the file and deleted it to free memory. The rank may be dead; the records that it wrote are complete.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatrain.contracts.black_box.reader import BlackBoxReader
from megatrain.contracts.black_box.values import ClockBase, Progress, RecordFlag, State
from megatrain.contracts.errors import DataError
from megatrain.programs.processes import process_stat
from megatrain_diagnostics.events.roster import axis_values
from megatrain_diagnostics.events.tables import (
    Groups,
    Ranks,
    Spans,
    StepTotals,
    Table,
    Values,
    from_columns,
    joined,
    select,
)
from megatrain_diagnostics.streamer.record_tables import (
    RecordSource,
    is_sampled,
    kinds_of,
    spans_table,
    totals_table,
    values_table,
)
from megatrain_diagnostics.streamer.ring_tail import Records, RingTail

EVIDENCE_RECORDS = 8192
"""Number of a rank's newest records that are streamed around an incident: a few steps, sampled or not."""
_MAX_INT32 = 2**31 - 1
"""Largest value of a 32-bit column."""
_LATEST_NS = 2**61
"""A time that no monotonic clock reaches."""
Tables = list[tuple[type[Table], Table]]


class RankTail:
    """Follows one black box. Raises from `poll` and `evidence`: DataError."""

    def __init__(self, path: Path, clock: HostClock) -> None:
        """Open the box. Raises: DataError."""
        self.path = path
        self._reader = BlackBoxReader(path)
        self._clock = clock
        self.identity = self._reader.identity
        if excess := _excess(self._reader):
            self._reader.close()
            raise DataError(f"{path}: invalid header: {excess}; the value is too large for a job")
        self._period = 1
        self._source = RecordSource(self.identity.round, self.identity.rank, clock.offset_ns)
        self._ring = RingTail(self._reader)
        self._sent_groups = {0}
        self._is_announced = False
        self.progress: Progress = self._reader.progress()
        self._is_alive, self._state = True, State.RUNNING
        self.totals: StepTotals | None = None
        """All totals of the last completed step that was seen."""
        self._newest_totals: StepTotals | None = None
        """As `totals`, but the rank may be writing further ones of the same step."""
        self.values: Values | None = None
        """The values of each kind in the last step that has any of it."""
        self.num_lost = 0
        """Records that were overwritten in the ring before they were read."""
        self.num_invalid = 0

    @property
    def name(self) -> str:
        """Return an identifier of this box that is unique on the host."""
        return f"{self.path.name}:{self.identity.pid}"

    @property
    def position(self) -> int:
        """Return the number up to which all records were returned or lost."""
        return self._ring.done

    def skip_to(self, sequence: int) -> None:
        """Skip the records up to `sequence`, which an earlier streamer process has sent."""
        self._ring = RingTail(self._reader, sequence)

    def check_process(self) -> None:
        """Check whether the rank's process exists. Separate from `poll`, because it costs as much as a poll."""
        stat = process_stat(self.identity.pid)
        self._is_alive = stat is not None and not stat.is_dead

    @property
    def is_running(self) -> bool:
        """Whether the rank can write more: its process existed at the last check, and has not closed its box."""
        return self._is_alive and self._state is State.RUNNING

    @property
    def has_ended_well(self) -> bool:
        return self._state is State.CLOSED

    def poll(self) -> Tables:
        """Return the new rows."""
        status = self._reader.status()
        self.progress, self._state = status.progress, status.state
        polled = self._ring.poll(status.cursor)
        self.num_lost += polled.num_lost
        found: Tables = [] if self._is_announced else [(Ranks, self._ranks_row())]
        self._is_announced = True
        is_writing_totals = False
        if len(polled.ended):
            found += self._rows(polled.ended)
            # a rank writes the totals of a step without a pause, so others may follow if the newest record is one
            is_writing_totals = bool(polled.ended["flags"][-1] & RecordFlag.STEP_TOTAL)
        if not is_writing_totals:
            self.totals = self._newest_totals
        return found

    def _rows(self, ended: Records) -> Tables:
        spans, totals, values, num_invalid = kinds_of(ended)
        self.num_invalid += num_invalid
        control = self._reader.control()
        self._period = self._period if control is None else min(control.sample_period, _MAX_INT32)
        chosen = spans[is_sampled(spans, self._period)]
        found: Tables = []
        groups = set(spans["group"].tolist()) - self._sent_groups
        if groups:
            self._sent_groups |= groups
            found.append((Groups, self._groups_rows()))
        if len(totals):
            rows = totals_table(totals, self._source)
            known = rows if self._newest_totals is None else joined(StepTotals, [self._newest_totals, rows])
            self._newest_totals = select(known, known.step == known.step.max())
            found.append((StepTotals, rows))
        if len(values):
            rows_of_values = values_table(values, self._source)
            self.values = _of_last_steps(self.values, rows_of_values)
            found.append((Values, rows_of_values))
        if len(chosen):
            found.append((Spans, spans_table(chosen, self._source)))
        return found

    def evidence(self) -> Tables:
        """Return the newest spans, ended or open, of sampled and other steps, and their groups."""
        spans, _, _, _ = kinds_of(self._ring.newest(EVIDENCE_RECORDS))
        return [(Groups, self._groups_rows()), (Spans, spans_table(spans, self._source))] if len(spans) else []

    def close(self) -> None:
        self._reader.close()

    def _ranks_row(self) -> Ranks:
        identity = self.identity
        row = {
            "round": identity.round, "rank": identity.rank,
            **axis_values(identity.layout, identity.rank),
            "pid": identity.pid, "at_ns": self._reader.clock.monotonic_ns + self._clock.offset_ns,
            "host": identity.host, "branch": identity.branch,
        }  # fmt: skip
        return from_columns(Ranks, {name: [value] for name, value in row.items()})

    def _groups_rows(self) -> Groups:
        known = self._reader.groups()
        self._sent_groups |= known.keys()
        groups = [
            group
            for _, group in sorted(known.items())
            if max(group.first_rank, abs(group.stride), group.num_ranks) <= _MAX_INT32
        ]
        return from_columns(
            Groups,
            {
                "round": [self.identity.round] * len(groups),
                "rank": [self.identity.rank] * len(groups),
                "group": [group.number for group in groups],
                "first_rank": [group.first_rank for group in groups],
                "stride": [group.stride for group in groups],
                "num_ranks": [group.num_ranks for group in groups],
                "name": [group.name for group in groups],
            },
        )


def _excess(reader: BlackBoxReader) -> str:
    """Return the part of a header that does not fit in the columns of a table; empty if the header is valid."""
    identity, at_ns = reader.identity, reader.clock.monotonic_ns
    most = max(identity.round, identity.layout.world_size)  # no rank and no size of an axis exceeds it
    if most > _MAX_INT32:
        return f"rank {identity.rank} of {identity.layout.world_size} ({identity.layout}) in round {identity.round}"
    return f"opened at {at_ns} ns of the monotonic clock" if at_ns > _LATEST_NS else ""


def _of_last_steps(before: Values | None, added: Values) -> Values:
    rows = added if before is None else joined(Values, [before, added])
    _, places = np.unique(rows.kind, return_inverse=True)
    last_steps = np.zeros(places.max() + 1, dtype=np.int64)
    np.maximum.at(last_steps, places, rows.step)
    return select(rows, rows.step == last_steps[places])


def box_inode(path: Path) -> int:
    """Return the inode, which differs from that of a later file with the same name; 0 if there is no file."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


@dataclass(frozen=True, slots=True)
class HostClock:
    """Converts monotonic to unix ns by a fixed offset, which was read once and is the same for the whole host.

    If the system's clock is set later, the events' times do not jump. The offset from the daemon's clock is measured
    by this clock too, so that events of different hosts can still be aligned.
    """

    base: ClockBase

    @property
    def offset_ns(self) -> int:
        """Return unix ns minus monotonic ns."""
        return self.base.unix_ns - self.base.monotonic_ns

    def now_ns(self) -> int:
        """Return the time by this clock, unix ns."""
        return self.offset_ns + time.monotonic_ns()
