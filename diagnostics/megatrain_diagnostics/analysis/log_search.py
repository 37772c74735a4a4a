"""Searches the output of all ranks for lines and for failures; the root cause comes before its consequences.

The incident of the round names the culprit. Without an incident, megatrain_job.failures classifies the logs: a rank
with a cause in its own log comes before ranks that only lost the connection to it, or waited for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatrain_diagnostics.events.roster import Roster, newest_round
from megatrain_diagnostics.events.rows import begins_run
from megatrain_diagnostics.events.source import EventSource, Where
from megatrain_diagnostics.events.tables import LogLines, Ranks, Selection, num_rows
from megatrain_job.failures.bundle import RankLog, judge, read_rank
from megatrain_job.failures.culprit import Culprit, FailureRole, culprit_of_logs
from megatrain_job.failures.verdict import NO_FAILURE, Verdict

_TAIL_LINES = 2000
"""Number of newest lines of a rank that are classified: a rank's last lines have the reason why it ended."""


@dataclass(frozen=True, slots=True)
class LoggedFailure:
    """The failure in the lines of one rank."""

    rank: int
    host: str
    label: str
    action: str
    role: FailureRole
    culprit: str
    """The ranks or hosts that the line blames; they may differ from `LogFinding.culprit`."""
    rule: str
    line: str
    at_ns: int
    """Time of `line` by the host's clock; time of the rank's last line if `line` is not found; 0 without any line."""


@dataclass(frozen=True, slots=True)
class LogFinding:
    """The culprit, and the ranks with a failure in their logs: the root first, then causes, then consequences.

    `classification`: the verdict of the line with the highest weight; with an incident, only lines of the culprit are
    used.
    """

    culprit: Culprit
    classification: Verdict
    failures: tuple[LoggedFailure, ...]
    num_ranks: int
    num_lines: int

    @property
    def label(self) -> str:
        return _label(self.culprit, self.classification, is_own=bool(self.classification.line))

    @property
    def action(self) -> str:
        own = str(self.classification.action)
        return own if self.classification.line else self.culprit.action or own


def _label(culprit: Culprit, classification: Verdict, *, is_own: bool) -> str:
    """Return the label of the failure at the root: from its own lines, or else from the incident."""
    return str(classification.label) if is_own or culprit.kind is None else culprit.label or str(culprit.kind)


def matching_lines(logs: LogLines, pattern: re.Pattern[str] | None) -> Selection:
    """Return the rows with a matching line, sorted by time, rank and place in the log."""
    rows = np.arange(len(logs.rank))
    if pattern is not None:
        rows = np.array([row for row in rows.tolist() if pattern.search(str(logs.line[row]))], dtype=np.int64)
    return rows[np.lexsort((logs.sequence[rows], logs.rank[rows], logs.at_ns[rows]))]


def newest_logged(source: EventSource) -> int:
    """Return the newest round in which ranks reported, or a later one that has only log lines.

    A round that failed before its ranks reported has only log lines.
    """
    ranks = source.read(Ranks)
    if not num_rows(ranks):
        return int(max(source.read(LogLines).round, default=0))
    newest = newest_round(ranks)
    while num_rows(source.read(LogLines, Where(rounds=(newest + 1,)))):
        newest += 1
    return newest


def classify_logs(logs: LogLines, roster: Roster | None = None, recorded: Culprit | None = None) -> LogFinding:
    """Return the failures, from the last lines of all ranks' logs.

    A rank of the roster without any line has an empty log, which may itself be a symptom. `recorded`: the culprit in
    this round's incident; None if there is no incident.
    """
    rows_of = _rows_by_rank(logs)
    known = set(rows_of) if roster is None else {*rows_of, *range(roster.layout.world_size)}
    read = [read_rank(str(rank), _tail(logs, rows_of.get(rank))) for rank in sorted(known)]
    hosts = {rank: _host_of(rank, logs, rows_of.get(rank), roster) for rank in known}
    bundle = judge(read)
    culprit = recorded or culprit_of_logs(bundle, lambda rank: hosts.get(rank, ""))
    classification = bundle.verdict if recorded is None else _classification_of(recorded, read, hosts)
    failures = [
        found
        for log in read
        if (found := _failure(log, logs, rows_of.get(int(log.rank)), culprit, hosts[int(log.rank)], classification))
        is not None
    ]
    failures.sort(key=lambda failure: (list(FailureRole).index(failure.role), failure.at_ns, failure.rank))
    return LogFinding(culprit, classification, tuple(failures), len(rows_of), len(logs.rank))


def _classification_of(culprit: Culprit, read: Sequence[RankLog], hosts: Mapping[int, str]) -> Verdict:
    """Classify the culprit's own lines; NO_FAILURE if they only report failures of other ranks, or are missing."""
    own = [log for log in read if culprit.is_named and culprit.blames(int(log.rank), hosts[int(log.rank)])]
    causes = [log.evidence for log in own if log.is_own_cause and log.evidence is not None]
    return max(causes, key=lambda cause: cause.weight).verdict if causes else NO_FAILURE


def _host_of(rank: int, logs: LogLines, rows: Selection | None, roster: Roster | None) -> str:
    host = "" if roster is None else roster.host_of(rank)
    return host or ("" if rows is None or not len(rows) else str(logs.host[rows[-1]]))


def _rows_by_rank(logs: LogLines) -> dict[int, Selection]:
    """Return rank -> the rows of its lines, in the order of its log."""
    order = np.lexsort((logs.sequence, logs.rank))
    starts = np.flatnonzero(begins_run(logs.rank[order]))
    return {int(logs.rank[rows[0]]): rows for rows in np.split(order, starts[1:]) if len(rows)}


def _tail(logs: LogLines, rows: Selection | None) -> str:
    return "" if rows is None else "\n".join(str(line) for line in logs.line[rows[-_TAIL_LINES:]])


def _failure(
    log: RankLog, logs: LogLines, rows: Selection | None, culprit: Culprit, host: str, classification: Verdict
) -> LoggedFailure | None:
    """Return the failure in a rank's log; None if the rank is not the culprit and its log shows no failure."""
    rank = int(log.rank)
    own = NO_FAILURE if log.evidence is None or not log.weight else log.evidence.verdict
    role = culprit.role(rank, host, str(own.label), is_victim=own.is_cascade)
    if role is not FailureRole.ROOT and not log.weight:
        return None
    if role is FailureRole.ROOT and not culprit.incident:
        own = classification  # the root may have logged nothing, so other ranks' lines are used too
    line = own.line.strip()
    at_ns = 0
    if rows is not None and len(rows):
        matching = [row for row in rows[-_TAIL_LINES:].tolist() if line and line in str(logs.line[row])]
        at_ns = int(logs.at_ns[matching[0] if matching else rows[-1]])
    return LoggedFailure(
        rank=rank,
        host=host,
        label=str(own.label) if role is not FailureRole.ROOT else _label(culprit, own, is_own=log.is_own_cause),
        action=str(own.action),
        role=role,
        culprit=own.culprit or "",
        rule=own.rule,
        line=line,
        at_ns=at_ns,
    )
