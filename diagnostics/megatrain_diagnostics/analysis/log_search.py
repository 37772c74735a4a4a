"""The output of all ranks: lines that match, and what failed, the root cause before what followed from it.

The incident of the round names the culprit. Where none does, megatrain.failures judges the logs: a rank whose
own log names a cause comes before those who only lost it or waited.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatrain.failures.bundle import RankLog, judge, read_rank
from megatrain.failures.culprit import Culprit, Role, culprit_of_logs
from megatrain.failures.verdict import NO_FAILURE, Verdict
from megatrain_diagnostics.events.roster import Roster, newest_round
from megatrain_diagnostics.events.source import EventSource, Where
from megatrain_diagnostics.events.tables import LogLines, Ranks, Selection, num_rows

_TAIL_LINES = 2000
"""Of a rank's lines so many of the newest are judged: what ended a rank is at the end."""


@dataclass(frozen=True, slots=True)
class LoggedFailure:
    """What one rank's lines say."""

    rank: int
    host: str
    label: str
    action: str
    role: Role
    culprit: str
    """The ranks or hosts that the line names, which need not be the culprit."""
    rule: str
    line: str
    at_ns: int
    """Of the line that tells, by the host's clock; of the rank's last line where it is not found."""


@dataclass(frozen=True, slots=True)
class LogFinding:
    """The culprit, and the ranks whose logs show a failure: the root first, then causes, then what followed.

    `verdict`: on the line that tells most of it, of the root wherever that said something of its own.
    """

    culprit: Culprit
    verdict: Verdict
    failures: tuple[LoggedFailure, ...]
    num_ranks: int
    num_lines: int

    @property
    def label(self) -> str:
        return _label(self.culprit, self.verdict, is_own=bool(self.verdict.line))

    @property
    def action(self) -> str:
        return str(self.verdict.action) if self.verdict.line else self.culprit.action or str(self.verdict.action)


def _label(culprit: Culprit, verdict: Verdict, *, is_own: bool) -> str:
    """Return what went wrong at the root: as its own words say, else as the incident does."""
    return str(verdict.label) if is_own or culprit.kind is None else culprit.label or str(culprit.kind)


def matching_lines(logs: LogLines, pattern: re.Pattern[str] | None) -> Selection:
    """Return the rows whose line matches, in order of time; of equal times in order of rank and place."""
    rows = np.arange(len(logs.rank))
    if pattern is not None:
        rows = np.array([row for row in rows.tolist() if pattern.search(str(logs.line[row]))], dtype=np.int64)
    return rows[np.lexsort((logs.sequence[rows], logs.rank[rows], logs.at_ns[rows]))]


def newest_logged(source: EventSource) -> int:
    """Return the newest round that wrote anything: one that failed before it had ranks has lines only."""
    ranks = source.read(Ranks)
    if not num_rows(ranks):
        return int(max(source.read(LogLines).round, default=0))
    newest = newest_round(ranks)
    while num_rows(source.read(LogLines, Where(rounds=(newest + 1,)))):
        newest += 1
    return newest


def classify_logs(logs: LogLines, roster: Roster | None = None, recorded: Culprit | None = None) -> LogFinding:
    """Return what failed, from the ends of all ranks' logs.

    A rank of the roster without any line logs nothing, which may be the finding. `recorded`: the culprit that an
    incident of this round blames; None where none does.
    """
    rows_of = _rows_by_rank(logs)
    known = set(rows_of) if roster is None else {*rows_of, *range(roster.layout.world_size)}
    read = [read_rank(str(rank), _tail(logs, rows_of.get(rank))) for rank in sorted(known)]
    hosts = {rank: _host_of(rank, logs, rows_of.get(rank), roster) for rank in known}
    bundle = judge(read)
    culprit = recorded or culprit_of_logs(bundle, lambda rank: hosts.get(rank, ""))
    verdict = bundle.verdict if recorded is None else _verdict_on(recorded, read, hosts)
    failures = [
        found
        for log in read
        if (found := _failure(log, logs, rows_of.get(int(log.rank)), culprit, hosts[int(log.rank)], verdict))
        is not None
    ]
    failures.sort(key=lambda one: (list(Role).index(one.role), one.at_ns, one.rank))
    return LogFinding(culprit, verdict, tuple(failures), len(rows_of), len(logs.rank))


def _verdict_on(culprit: Culprit, read: Sequence[RankLog], hosts: Mapping[int, str]) -> Verdict:
    """Return the verdict on what the culprit itself wrote; none where it only tells what the others do, or nothing."""
    own = [log for log in read if culprit.is_named and culprit.blames(int(log.rank), hosts[int(log.rank)])]
    told = [log.evidence for log in own if log.is_own_cause and log.evidence is not None]
    return max(told, key=lambda one: one.weight).verdict if told else NO_FAILURE


def _host_of(rank: int, logs: LogLines, rows: Selection | None, roster: Roster | None) -> str:
    told = "" if roster is None else roster.host_of(rank)
    return told or ("" if rows is None or not len(rows) else str(logs.host[rows[-1]]))


def _rows_by_rank(logs: LogLines) -> dict[int, Selection]:
    order = np.lexsort((logs.sequence, logs.rank))
    ranks = logs.rank[order]
    starts = np.flatnonzero(np.r_[True, np.diff(ranks) != 0]) if len(ranks) else np.array([], dtype=np.int64)
    ends = np.r_[starts[1:], len(ranks)]
    return {int(ranks[first]): order[first:last] for first, last in zip(starts, ends, strict=False)}


def _tail(logs: LogLines, rows: Selection | None) -> str:
    return "" if rows is None else "\n".join(str(line) for line in logs.line[rows[-_TAIL_LINES:]])


def _failure(
    log: RankLog, logs: LogLines, rows: Selection | None, culprit: Culprit, host: str, verdict: Verdict
) -> LoggedFailure | None:
    """Return what a rank's log says; None where it is not to blame and tells of no failure."""
    rank = int(log.rank)
    own = NO_FAILURE if log.evidence is None or not log.weight else log.evidence.verdict
    role = culprit.role(rank, host, str(own.label), is_victim=own.is_cascade)
    if role is not Role.ROOT and not log.weight:
        return None
    if role is Role.ROOT and not culprit.incident:
        own = verdict  # of a root that logs nothing the others' words tell what happened
    line = own.line.strip()
    at_ns = 0
    if rows is not None and len(rows):
        told = [row for row in rows[-_TAIL_LINES:].tolist() if line and line in str(logs.line[row])]
        at_ns = int(logs.at_ns[told[0] if told else rows[-1]])
    return LoggedFailure(
        rank=rank,
        host=host,
        label=str(own.label) if role is not Role.ROOT else _label(culprit, own, is_own=log.is_own_cause),
        action=str(own.action),
        role=role,
        culprit=own.culprit or "",
        rule=own.rule,
        line=line,
        at_ns=at_ns,
    )
