"""The last lines of the logs before an incident: the culprit's, then the others'. No line of a victim is the culprit's.

Whom to blame is what the incident says; what a line means is what the rules of megatrain.failures say, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatrain.contracts.errors import DataError
from megatrain.contracts.incident import Incident, IncidentKind, IncidentState
from megatrain.contracts.run_directory import RunDirectory, rank_log_path
from megatrain.failures.culprit import NOBODY, Culprit, culprit_of_incident, is_break
from megatrain_diagnostics.analysis.log_search import LogFinding, classify_logs
from megatrain_diagnostics.dashboard.pages.incidents.document import IncidentLineDocument, IncidentLogsDocument
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import LogLines
from megatrain_diagnostics.store.log_query import logged_round, newest_lines, newest_tails, no_lines
from megatrain_diagnostics.store.reader import StoredEvents, TooSlowError

_NS = 1_000_000_000
_MOST_LINES = 40
"""Of the culprit, and as many of the others."""
_MOST_READ = 500
"""Of the others with the culprit's among them."""
_AFTER_S = 1.0
"""Lines are stamped when they are read, a moment after they were written."""
_OTHERS_S = 30.0
"""Of the others lines from so long before the incident began on are shown."""
_BUDGET_S = 2.0
_CAUSES_BUDGET_S = 10.0
_MOST_JUDGED_LINES = 50_000
_MOST_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class LogPlaces:
    """Where lines are, and what is known of the incident's round."""

    events: StoredEvents
    run: RunDirectory
    roster: Roster | None
    host_of: Callable[[int], str]


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    own: LogLines
    others: LogLines
    finding: LogFinding | None = None
    problem: str = ""

    @property
    def telling_line(self) -> str:
        return "" if self.finding is None else self.finding.verdict.line.strip()

    @property
    def telling_rank(self) -> int | None:
        """The rank that wrote it."""
        told = () if self.finding is None or not self.telling_line else self.finding.failures
        return next((one.rank for one in told if one.line.strip() == self.telling_line), None)


def incident_logs(incident: Incident, places: LogPlaces, now_s: float) -> IncidentLogsDocument:
    """Return the lines of an incident; where there are none, why not."""
    culprit = culprit_of_incident(incident) or NOBODY
    until_s = _until_s(incident, now_s)
    found = _found(incident, culprit, places, int(until_s * _NS))
    file = _log_file(incident, culprit, places)
    is_missing = culprit.is_named and not len(found.own.rank)
    problem = found.problem or ("no line of the culprit was stored until then" if is_missing else "")
    return IncidentLogsDocument(
        round=incident.round,
        until_unix_s=until_s,
        culprit_text=culprit.text,
        culprit_lines=_lines(found.own, found, lambda rank, host: True),
        other_lines=_lines(found.others, found, lambda rank, host: not culprit.blames(rank, host)),
        label="" if found.finding is None else found.finding.label,
        action="" if found.finding is None else found.finding.action,
        telling_line=found.telling_line[:_MOST_CHARACTERS],
        telling_rank=found.telling_rank,
        problem=f"{problem}{_file_text(file)}" if problem else "",
        log_file="" if file is None else str(file),
    )


def _until_s(incident: Incident, now_s: float) -> float:
    """Return up to when lines belong to an incident: until its workers were gone, and now while they are not."""
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
            own = newest_lines(events, where, _MOST_LINES, budget_s=_BUDGET_S)
        first_ns = int((incident.moments.began - _OTHERS_S) * _NS)
        around = Where(rounds, first_ns=first_ns, last_ns=until_ns)
        others = newest_lines(events, around, _MOST_READ, budget_s=_BUDGET_S)
        return _Found(own, others, _finding(incident, places))
    except TooSlowError as error:
        return _Found(no_lines(), no_lines(), problem=f"the lines take too long to read: {error}")
    except DataError as error:
        return _Found(no_lines(), no_lines(), problem=str(error))


def _finding(incident: Incident, places: LogPlaces) -> LogFinding | None:
    """Return what the ends of all logs say; of a round that did not break they say nothing. Raises: DataError."""
    if not is_break(incident):
        return None
    num_ranks = 1 if places.roster is None else places.roster.layout.world_size
    tails = newest_tails(
        places.events, Where((incident.round,)), _MOST_JUDGED_LINES, num_ranks=num_ranks, budget_s=_CAUSES_BUDGET_S
    )
    return classify_logs(tails, places.roster, culprit_of_incident(incident))


def _lines(lines: LogLines, found: _Found, is_shown: Callable[[int, str], bool]) -> tuple[IncidentLineDocument, ...]:
    rows = [row for row in range(len(lines.rank)) if is_shown(int(lines.rank[row]), str(lines.host[row]))]
    telling = found.telling_line
    return tuple(
        IncidentLineDocument(
            rank=int(lines.rank[row]),
            host=str(lines.host[row]),
            at_unix_s=int(lines.at_ns[row]) / _NS,
            line=str(lines.line[row])[:_MOST_CHARACTERS],
            is_telling=bool(telling) and telling in str(lines.line[row]),
        )
        for row in rows[-_MOST_LINES:]
    )


def _log_file(incident: Incident, culprit: Culprit, places: LogPlaces) -> Path | None:
    """Return where the culprit's log lies; None where no rank or host is known."""
    rank = min(culprit.ranks, default=None)
    if rank is None:
        return None
    host = places.host_of(rank) or next(iter(culprit.hosts), "")
    # a name from a record, which may be anybody's
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
        else f"; its log {file} is not there: it was removed, or is on that host alone"
    )
