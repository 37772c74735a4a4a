"""The last log lines before an incident: those of the culprit, then those of other ranks.

A victim's lines are never among the culprit's. The incident names the culprit. The rules of megatrain_job.failures
classify the lines, as everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatrain.contracts.errors import DataError
from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState
from megatrain.run_files.run_directory import RunDirectory, rank_log_path
from megatrain_dashboard.api.incidents.document import IncidentLineDocument, IncidentLogsDocument
from megatrain_dashboard.settings import Limits
from megatrain_dashboard.sources.log_causes import classified_round
from megatrain_diagnostics.analysis.log_search import LogFinding
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import LogLines
from megatrain_diagnostics.store.log_query import logged_round, newest_lines, no_lines
from megatrain_diagnostics.store.reader import StoredEvents, TooSlowError
from megatrain_job.failures.culprit import NO_CULPRIT, Culprit, culprit_of_incident, is_break

_NS = 1_000_000_000
_MAX_LINES = 40
"""Limit of the lines of the culprit, and of the lines of other ranks."""
_MAX_READ = 500
"""Limit of the lines that are read to find those of other ranks; they include the culprit's."""
_AFTER_S = 1.0
"""Lines get their time when the streamer reads them, a moment after they were written."""
_OTHERS_S = 30.0
"""Lines of other ranks are shown from this long before the incident began."""
_MAX_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class LogPlaces:
    """The sources of lines, and the data of the incident's round."""

    events: StoredEvents
    run: RunDirectory
    roster: Roster | None
    host_of: Callable[[int], str]
    limits: Limits


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    own: LogLines
    others: LogLines
    finding: LogFinding | None = None
    problem: str = ""

    @property
    def cause_line(self) -> str:
        return "" if self.finding is None else self.finding.classification.line.strip()

    @property
    def cause_rank(self) -> int | None:
        """The rank that wrote the line that shows the cause."""
        failures = () if self.finding is None or not self.cause_line else self.finding.failures
        return next((failure.rank for failure in failures if failure.line.strip() == self.cause_line), None)


def incident_logs(incident: Incident, places: LogPlaces, now_s: float) -> IncidentLogsDocument:
    """Return the lines of an incident; where there are none, the reason."""
    culprit = culprit_of_incident(incident) or NO_CULPRIT
    until_s = _until_s(incident, now_s)
    found = _found(incident, culprit, places, int(until_s * _NS))
    file = _log_file(incident, culprit, places)
    is_missing = culprit.is_named and not len(found.own.rank)
    problem = found.problem or ("no line of the culprit is stored for this incident" if is_missing else "")
    return IncidentLogsDocument(
        round=incident.round,
        until_unix_s=until_s,
        culprit_text=culprit.text,
        culprit_lines=_lines(found.own, found, lambda rank, host: True),
        other_lines=_lines(found.others, found, lambda rank, host: not culprit.blames(rank, host)),
        label="" if found.finding is None else found.finding.label,
        action="" if found.finding is None else found.finding.action,
        cause_line=found.cause_line[:_MAX_CHARACTERS],
        cause_rank=found.cause_rank,
        problem=f"{problem}{_file_text(file)}" if problem else "",
        log_file="" if file is None else str(file),
    )


def _until_s(incident: Incident, now_s: float) -> float:
    """Return the time up to which lines belong to an incident: when its workers were gone, or now while they run.

    If the incident broke no round, it is the time of its detection.
    """
    moments = incident.moments
    if incident.kind is IncidentKind.LAUNCH_LOST:
        return moments.began + _AFTER_S
    if incident.state is IncidentState.OPEN and moments.halted is None:
        return max(now_s, moments.detected)
    return (moments.halted if is_break(incident) and moments.halted is not None else moments.detected) + _AFTER_S


def _found(incident: Incident, culprit: Culprit, places: LogPlaces, until_ns: int) -> _Found:
    events, rounds = places.events, (incident.round,)
    try:
        logged_round(events, incident.round)
        own = no_lines()
        if culprit.is_named:
            hosts = None if culprit.ranks else culprit.hosts
            where = Where(rounds, ranks=culprit.ranks or None, hosts=hosts, last_ns=until_ns)
            own = newest_lines(events, where, _MAX_LINES, budget_s=places.limits.log_search_s)
        first_ns = int((incident.moments.began - _OTHERS_S) * _NS)
        around = Where(rounds, first_ns=first_ns, last_ns=until_ns)
        others = newest_lines(events, around, _MAX_READ, budget_s=places.limits.log_search_s)
        return _Found(own, others, _finding(incident, places))
    except TooSlowError as error:
        return _Found(no_lines(), no_lines(), problem=f"the lines take too long to read: {error}")
    except DataError as error:
        return _Found(no_lines(), no_lines(), problem=str(error))


def _finding(incident: Incident, places: LogPlaces) -> LogFinding | None:
    """Return the classification of the ends of all logs; None for a round that did not break. Raises: DataError."""
    if not is_break(incident):
        return None
    culprit, budget_s = culprit_of_incident(incident), places.limits.log_causes_s
    return classified_round(places.events, places.roster, incident.round, culprit, budget_s)


def _lines(lines: LogLines, found: _Found, is_shown: Callable[[int, str], bool]) -> tuple[IncidentLineDocument, ...]:
    rows = [row for row in range(len(lines.rank)) if is_shown(int(lines.rank[row]), str(lines.host[row]))]
    cause_line = found.cause_line
    return tuple(
        IncidentLineDocument(
            rank=int(lines.rank[row]),
            host=str(lines.host[row]),
            at_unix_s=int(lines.at_ns[row]) / _NS,
            line=str(lines.line[row])[:_MAX_CHARACTERS],
            is_cause=bool(cause_line) and cause_line in str(lines.line[row]),
        )
        for row in rows[-_MAX_LINES:]
    )


def _log_file(incident: Incident, culprit: Culprit, places: LogPlaces) -> Path | None:
    """Return the path of the culprit's log; None where no rank or host is known."""
    rank = min(culprit.ranks, default=None)
    if rank is None:
        return None
    host = places.host_of(rank) or next(iter(culprit.hosts), "")
    # the host name comes from a record that any program may have written, so it must not contain a path
    return (
        rank_log_path(places.run.logs.absolute() / host, incident.round, rank)
        if host and Path(host).name == host
        else None
    )


def _file_text(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        is_there = file.is_file()
    except OSError:
        is_there = False
    return (
        f"; its log is {file}"
        if is_there
        else f"; its log {file} is not here: it was removed, or exists only on that host"
    )
