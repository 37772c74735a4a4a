"""Joins spans of different ranks that are parts of one exchange: the members of a collective, a send and its receive.

The parts of an exchange have the same group (by name and members) and the same number within that group. Data is
transferred after the last part began; before that, a rank waits for a peer ("Understanding Stragglers", OSDI'25:
the transfer time of a rank is its own end minus the latest start among its peers). If recording was switched on or off
while ranks ran, their numbers may differ. Parts that contradict each other are therefore counted, not joined.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.black_box.operations import MAX_OPERATIONS, Operation
from megatrain.formatting import count_text
from megatrain_diagnostics.events.roster import GroupMembers, Roster
from megatrain_diagnostics.events.rows import begins_run, is_any_of
from megatrain_diagnostics.events.tables import NO_DURATION, Int8, Int32, Int64, Spans

_SENDS = (Operation.FORWARD_SEND, Operation.BACKWARD_SEND)
_RECEIVES = (Operation.FORWARD_RECV, Operation.BACKWARD_RECV)
_NO_EXCHANGE = -1
_UNKNOWN = -2


@dataclass(frozen=True, slots=True, eq=False)
class Exchanges:
    """Exchanges of spans. `parts[first[i] : first[i + 1]]` are the rows of exchange i in the table of spans."""

    parts: Int64
    first: Int64
    groups: tuple[GroupMembers, ...]
    group_of: Int64
    """Index in `groups` of each exchange."""
    operation: Int8
    """Operation number of each exchange; for a send and its receive, the number of the send."""
    step: Int32
    num_parts: Int64
    is_whole: NDArray[np.bool_]
    """Whether all members of the group have a part, and all parts have ended."""
    latest_start_ns: Int64
    last_part: Int64
    """Row of the part that began last, for each exchange."""
    exchange_of: Int64
    """Exchange of each row of the table of spans; -1: none."""
    num_contradicting: int
    """Rows of exchanges whose parts contradict each other."""
    num_unknown: int
    """Rows whose group is unknown."""

    def __len__(self) -> int:
        return len(self.group_of)

    @property
    def num_members(self) -> Int64:
        """Return the number of members of the group of each exchange."""
        return _sizes(self.groups)[self.group_of]

    def problems(self) -> tuple[str, ...]:
        """Return sentences about the rows that could not be joined."""
        found = []
        if self.num_contradicting:
            found.append(
                f"{count_text(self.num_contradicting, 'communication span')} without a matching span of a peer: "
                "which rank waited there is not known"
            )
        if self.num_unknown:
            found.append(
                f"{count_text(self.num_unknown, 'span')} whose group is not known: which rank waited there is not known"
            )
        return tuple(found)

    def arrived_ns(self, spans: Spans) -> Int64:
        """Return for each span the latest start in its exchange; its own start if it is in no exchange."""
        arrived = spans.start_ns.copy()
        has = np.flatnonzero(self.exchange_of >= 0)
        arrived[has] = self.latest_start_ns[self.exchange_of[has]]
        return arrived


def end_ns(spans: Spans) -> Int64:
    """Return the end of each span; its start if it has not ended."""
    return spans.start_ns + np.maximum(spans.duration_ns, 0)


def find_exchanges(spans: Spans, roster: Roster) -> Exchanges:
    """Return the exchanges in spans of one round. The times of all spans must be of one clock."""
    groups, group_of_span = _identify_groups(spans, roster)
    rows = np.flatnonzero((group_of_span >= 0) & (spans.collective > 0))
    rows = rows[np.lexsort((spans.rank[rows], spans.collective[rows], group_of_span[rows]))]
    first = _boundaries(group_of_span[rows], spans.collective[rows])
    fits = _fitting(spans, rows, first, groups, group_of_span)
    counts = np.diff(first)
    num_contradicting = int(counts[~fits].sum())
    rows = rows[np.repeat(fits, counts)]
    first = np.concatenate(([0], np.cumsum(counts[fits])))
    num_unknown = int(((group_of_span == _UNKNOWN) & (spans.collective > 0)).sum())
    return _summarize(spans, rows, first, groups, group_of_span, (num_contradicting, num_unknown))


def _identify_groups(spans: Spans, roster: Roster) -> tuple[tuple[GroupMembers, ...], Int64]:
    """Return the distinct groups, and for each span the index of its group; negative: no group, or an unknown one."""
    index: dict[GroupMembers, int] = {}
    # one look-up for each pair of rank and group number, instead of each span
    pairs, of_span = np.unique(spans.rank.astype(np.int64) << 16 | spans.group, return_inverse=True)
    found = np.full(len(pairs), _NO_EXCHANGE, dtype=np.int64)
    for place, pair in enumerate(pairs.tolist()):
        if not pair & 0xFFFF:
            continue
        members = roster.groups.get((pair >> 16, pair & 0xFFFF))
        if members is None:
            found[place] = _UNKNOWN
        elif members.num_ranks > 1:
            found[place] = index.setdefault(members, len(index))
    return tuple(index), found[of_span.reshape(-1)]


def _boundaries(*keys: Int64) -> Int64:
    """Return the index where each run of equal keys begins, and the end of the last run."""
    return np.concatenate((np.flatnonzero(begins_run(*keys)), [len(keys[0])]))


def _sizes(groups: tuple[GroupMembers, ...]) -> Int64:
    return np.array([group.num_ranks for group in groups], dtype=np.int64)


def _fitting(
    spans: Spans, rows: Int64, first: Int64, groups: tuple[GroupMembers, ...], group_of_span: Int64
) -> NDArray[np.bool_]:
    """Return which runs of rows are one exchange: same step and operation, no rank twice, no more rows than members."""
    num = len(first) - 1
    if not num:
        return np.zeros(0, dtype=bool)
    kind = _exchange_operation()[np.minimum(spans.operation[rows], MAX_OPERATIONS - 1)]
    begins = first[:-1]
    fits = np.ones(num, dtype=bool)
    for column in (kind, spans.step[rows]):
        fits &= np.maximum.reduceat(column, begins) == np.minimum.reduceat(column, begins)
    run = np.repeat(np.arange(num), np.diff(first))
    fits &= np.logical_and.reduceat(begins_run(spans.rank[rows], run), begins)  # no rank has two rows
    fits &= np.diff(first) <= _sizes(groups)[group_of_span[rows[begins]]]
    # a link has one direction: two sends, or two receives, belong to different exchanges
    for side in (_SENDS, _RECEIVES):
        fits &= np.add.reduceat(is_any_of(spans.operation[rows], side).astype(np.int64), begins) <= 1
    return fits


def _exchange_operation() -> Int8:
    """Return the table that maps an operation's number to the number of its exchange."""
    table = np.arange(MAX_OPERATIONS, dtype=np.uint8)
    for send, receive in zip(_SENDS, _RECEIVES, strict=True):
        table[receive.number] = send.number
    return table


def _summarize(
    spans: Spans,
    rows: Int64,
    first: Int64,
    groups: tuple[GroupMembers, ...],
    group_of_span: Int64,
    not_joined: tuple[int, int],
) -> Exchanges:
    num = len(first) - 1
    exchange_of = np.full(len(spans.rank), _NO_EXCHANGE, dtype=np.int64)
    exchange_of[rows] = np.repeat(np.arange(num), np.diff(first))
    begins = first[:-1]
    starts = spans.start_ns[rows]
    is_open = spans.duration_ns[rows] == NO_DURATION
    if num:
        latest = np.maximum.reduceat(starts, begins)
        any_open = np.logical_or.reduceat(is_open, begins)
        # sorted by (exchange, start): the last row of each run began last
        by_start = rows[np.lexsort((starts, np.repeat(np.arange(num), np.diff(first))))]
        last_part = by_start[first[1:] - 1]
    else:
        latest = last_part = np.zeros(0, dtype=np.int64)
        any_open = np.zeros(0, dtype=bool)
    group_of = group_of_span[rows[begins]] if num else np.zeros(0, dtype=np.int64)
    return Exchanges(
        parts=rows,
        first=first,
        groups=groups,
        group_of=group_of,
        operation=_exchange_operation()[np.minimum(spans.operation[rows[begins]], MAX_OPERATIONS - 1)],
        step=spans.step[rows[begins]],
        num_parts=np.diff(first),
        is_whole=(np.diff(first) == _sizes(groups)[group_of]) & ~any_open,
        latest_start_ns=latest,
        last_part=last_part,
        exchange_of=exchange_of,
        num_contradicting=not_joined[0],
        num_unknown=not_joined[1],
    )
