"""The output of all ranks: lines that match, and what failed, the root cause before what followed from it.

Judging is megatrain.failures' work: a rank whose own log names a cause comes before those who only lost it or waited.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from megatrain.failures.bundle import BundleVerdict, RankLog, judge, read_rank
from megatrain_diagnostics.events.roster import Roster, newest_round
from megatrain_diagnostics.events.source import EventSource, Where
from megatrain_diagnostics.events.tables import LogLines, Ranks, Selection, num_rows

_TAIL_LINES = 2000
"""Of a rank's lines so many of the newest are judged: what ended a rank is at the end."""


@dataclass(frozen=True, slots=True)
class LoggedFailure:
    """What one rank's lines say. `is_root`: it began here."""

    rank: int
    host: str
    label: str
    action: str
    is_root: bool
    is_cascade: bool
    culprit: str
    rule: str
    line: str
    at_ns: int
    """Of the line that tells, by the host's clock; of the rank's last line where it is not found."""


@dataclass(frozen=True, slots=True)
class LogFinding:
    """The verdict on the job, and the ranks that tell of a failure: the root first, then causes, then what followed."""

    verdict: BundleVerdict
    failures: tuple[LoggedFailure, ...]
    num_ranks: int
    num_lines: int


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


def classify_logs(logs: LogLines, roster: Roster | None = None) -> LogFinding:
    """Return what failed, from the ends of all ranks' logs.

    A rank of the roster without any line is one that logs nothing, which may be the news.
    """
    rows_of = _rows_by_rank(logs)
    known = set(rows_of) if roster is None else {*rows_of, *range(roster.layout.world_size)}
    read = [read_rank(str(rank), _tail(logs, rows_of.get(rank))) for rank in sorted(known)]
    verdict = judge(read)
    failures = [
        _failure(log, logs, rows_of.get(int(log.rank)), verdict, roster)
        for log in read
        if log.weight > 0 or log.rank == verdict.root_rank
    ]
    failures.sort(key=lambda one: (not one.is_root, one.is_cascade, one.at_ns, one.rank))
    return LogFinding(verdict, tuple(failures), len(rows_of), len(logs.rank))


def _rows_by_rank(logs: LogLines) -> dict[int, Selection]:
    order = np.lexsort((logs.sequence, logs.rank))
    ranks = logs.rank[order]
    starts = np.flatnonzero(np.r_[True, np.diff(ranks) != 0]) if len(ranks) else np.array([], dtype=np.int64)
    ends = np.r_[starts[1:], len(ranks)]
    return {int(ranks[first]): order[first:last] for first, last in zip(starts, ends, strict=False)}


def _tail(logs: LogLines, rows: Selection | None) -> str:
    return "" if rows is None else "\n".join(str(line) for line in logs.line[rows[-_TAIL_LINES:]])


def _failure(
    log: RankLog, logs: LogLines, rows: Selection | None, bundle: BundleVerdict, roster: Roster | None
) -> LoggedFailure:
    rank = int(log.rank)
    is_root = log.rank == bundle.root_rank
    verdict = bundle.verdict if is_root or log.evidence is None else log.evidence.verdict
    line = verdict.line.strip()
    host = "" if roster is None else roster.host_of(rank)
    at_ns = 0
    if rows is not None and len(rows):
        host = host or str(logs.host[rows[-1]])
        told = [row for row in rows[-_TAIL_LINES:].tolist() if line and line in str(logs.line[row])]
        at_ns = int(logs.at_ns[told[0] if told else rows[-1]])
    return LoggedFailure(
        rank=rank,
        host=host,
        label=str(verdict.label),
        action=str(verdict.action),
        is_root=is_root,
        is_cascade=verdict.is_cascade and not is_root,
        culprit=verdict.culprit or "",
        rule=verdict.rule,
        line=line,
        at_ns=at_ns,
    )
