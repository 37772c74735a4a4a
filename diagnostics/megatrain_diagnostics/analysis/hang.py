"""Finds the ranks that hold up a job without progress: those that never entered a collective in which others wait.

The rule is that of megatrain_job.failures.hang, which the driver uses too. Here its input comes from spans, black boxes
or Flight Recorder dumps, and its result is reported with hosts and coordinates. Spans, unlike black boxes, do not show
which of several open exchanges a rank waits for; so with spans the rule also uses which ranks are computing.
Source: MegaScale sec. 5.2 and fig. 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatrain.contracts.black_box.operations import operation_name
from megatrain.contracts.black_box.values import GroupRecord
from megatrain.contracts.layout import Coordinate
from megatrain_diagnostics.events.roster import GroupMembers, Roster
from megatrain_diagnostics.events.rows import begins_run
from megatrain_diagnostics.events.tables import NO_DURATION, Selection, Spans
from megatrain_job.failures.culprit import Culprit, culprit_of_positions
from megatrain_job.failures.hang import IMMOBILE, HangReport, Position, closest, hang_suspects, is_own_work


@dataclass(frozen=True, slots=True)
class RankActivity:
    """The activity of one rank in a hang. `positions`: group key (`group_key`), such as "dp:0+4x2" -> its position."""

    rank: int
    positions: Mapping[str, Position]
    in_flight: str = ""
    """The operation that the rank is in (the innermost one)."""
    step: int = -1
    phase: str = ""
    process_state: str | None = None
    """The process state in /proc while the round ran, a letter; empty: there was no process; None: not read."""
    is_busy: bool = False
    """Whether the rank was in a computation that began after all its open exchanges."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """One rank that is probably the cause."""

    rank: int
    host: str
    place: Coordinate
    step: int
    doing: str
    evidence: str


@dataclass(frozen=True, slots=True)
class HangFinding:
    """The culprit, and the ranks that wait. `report`: the result from the activities alone."""

    report: HangReport
    culprit: Culprit
    """The culprit in the incident of the round; without an incident, the one from the activities."""
    suspects: tuple[Suspect, ...]
    """The ranks of the recorded culprit; without an incident, the suspects from the activities."""
    hosts: tuple[str, ...]
    waiting: frozenset[int]
    silent: frozenset[int]
    in_flight: Mapping[int, str]
    """Rank -> the operation that it is in; no entry if that is not known."""


def group_key(group: GroupMembers | GroupRecord) -> str:
    """Return the key that identifies a group in the job, in the executors' form: "dp:0+4x2"."""
    return f"{group.name}:{group.first_rank}+{group.num_ranks}x{group.stride}"


def roster_groups(roster: Roster) -> dict[str, tuple[int, ...]]:
    """Return key -> sorted members, for the groups that ranks reported with their members.

    Groups larger than the layout are left out.
    """
    world_size = roster.layout.world_size
    return {
        group_key(group): tuple(rank for rank in sorted(group.ranks) if 0 <= rank < world_size)
        for group in set(roster.groups.values())
        if group.stride and group.num_ranks <= world_size
    }


def activities_of_spans(spans: Spans, roster: Roster) -> dict[int, RankActivity]:
    """Return the positions of ranks from their spans.

    A position is, for each group, the newest exchange that began, and the newest one before the first open exchange.
    """
    rows = np.flatnonzero((spans.round == roster.round) & (spans.group > 0))
    positions: dict[int, dict[str, Position]] = {int(rank): {} for rank in np.unique(spans.rank)}
    for rank, group, entered, finished in _newest_places(spans, rows):
        members = roster.groups.get((rank, group))
        if members is not None and members.stride:
            positions[rank][group_key(members)] = Position(entered, finished)
    busy = _innermost(spans, roster.round)
    return {
        rank: RankActivity(
            rank,
            found,
            in_flight=operation_name(int(spans.operation[busy[rank]])) if rank in busy else "",
            step=int(spans.step[busy[rank]]) if rank in busy else -1,
            is_busy=rank in busy and is_own_work(operation_name(int(spans.operation[busy[rank]]))),
        )
        for rank, found in positions.items()
    }


def find_hang(
    activities: Mapping[int, RankActivity],
    groups: Mapping[str, Sequence[int]],
    roster: Roster,
    silent: Iterable[int] = (),
    recorded: Culprit | None = None,
) -> HangFinding:
    """Return which ranks hold up the job. `silent`: ranks without data, in addition to those without an activity.

    `recorded`: the culprit in the incident of this round, which replaces the one from `activities`; None: no incident.
    """
    world = range(roster.layout.world_size)
    all_silent = {*silent, *(rank for rank in world if rank not in activities)}
    report = hang_suspects(
        {rank: activity.positions for rank, activity in activities.items()},
        groups,
        all_silent,
        [rank for rank, activity in activities.items() if activity.is_busy],
        {rank: activity.process_state for rank, activity in activities.items() if activity.process_state is not None},
    )
    culprit = culprit_of_positions(report, roster.host_of) if recorded is None else recorded
    suspected = report.suspects if recorded is None else _ranks_of(recorded, roster)
    suspects = tuple(_suspect(rank, activities, report, roster, culprit.reason) for rank in suspected if rank in world)
    return HangFinding(
        report=report,
        culprit=culprit,
        suspects=suspects,
        hosts=culprit.hosts or roster.hosts_of(suspect.rank for suspect in suspects),
        waiting=frozenset(report.waits_for),
        silent=frozenset(rank for rank in report.silent if rank in world),
        in_flight={rank: activity.in_flight for rank, activity in sorted(activities.items()) if activity.in_flight},
    )


def _newest_places(spans: Spans, rows: Selection) -> Iterable[tuple[int, int, int, int]]:
    """Yield (rank, group, newest exchange that began, newest exchange before the first open one)."""
    if not len(rows):
        return
    rank, group = spans.rank[rows].astype(np.int64), spans.group[rows].astype(np.int64)
    place = spans.collective[rows].astype(np.int64)
    # spans before an open one may be missing, because they were not streamed; they have ended
    ended = np.where(spans.duration_ns[rows] != NO_DURATION, np.iinfo(np.int64).max, place - 1)
    order = np.lexsort((group, rank))
    rank, group, place, ended = rank[order], group[order], place[order], ended[order]
    starts = np.flatnonzero(begins_run(rank, group))
    entered = np.maximum.reduceat(place, starts)
    finished = np.minimum(entered, np.minimum.reduceat(ended, starts))
    yield from zip(rank[starts].tolist(), group[starts].tolist(), entered.tolist(), finished.tolist(), strict=True)


def _innermost(spans: Spans, round_number: int) -> dict[int, int]:
    """Return for each rank the row of the open span that began last."""
    rows = np.flatnonzero((spans.round == round_number) & (spans.duration_ns == NO_DURATION))
    if not len(rows):
        return {}
    rows = rows[np.lexsort((spans.sequence[rows], spans.rank[rows]))]
    is_last = np.r_[np.diff(spans.rank[rows]) != 0, True]
    return {int(spans.rank[row]): int(row) for row in rows[is_last]}


def _ranks_of(culprit: Culprit, roster: Roster) -> tuple[int, ...]:
    return culprit.ranks or tuple(rank for host in culprit.hosts for rank in roster.ranks_on(host))


def _suspect(
    rank: int, activities: Mapping[int, RankActivity], report: HangReport, roster: Roster, reason: str
) -> Suspect:
    at, activity = roster.coordinate(rank), activities.get(rank)
    missed = closest(entry for entry in report.missing if rank in entry.held_up_by)
    process = None if activity is None or activity.process_state is None else IMMOBILE.get(activity.process_state)
    if process is not None:
        evidence = (
            process
            if missed is None
            else (f"{process}; {len(missed.waiting)} waiting for it in collective {missed.sequence} of {missed.group}")
        )
    elif activity is None or rank in report.silent:
        evidence = "logs nothing"
    elif missed is None:
        evidence = reason
    else:
        verb = "never entered" if rank in missed.absent else "does not wait for the end of"
        evidence = f"{verb} collective {missed.sequence} of {missed.group}; {len(missed.waiting)} waiting in it"
    doing = "" if activity is None else activity.in_flight or activity.phase
    return Suspect(rank, roster.host_of(rank), at, -1 if activity is None else activity.step, doing, evidence)
