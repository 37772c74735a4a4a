"""GET /hosts and /hosts/{host}: the state of each host, why it does not train, its checks and its incidents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.errors import DataError
from megatrain.contracts.natural_order import natural_order
from megatrain.contracts.records.host_records import CheckReport
from megatrain.contracts.records.incident import Incident
from megatrain.contracts.records.rounds import RoundHost
from megatrain.formatting import names_text
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import document_response
from megatrain_dashboard.responses.document import Document, ThresholdsDocument, thresholds_document
from megatrain_dashboard.responses.errors import not_found, shown
from megatrain_dashboard.sources.hosts import HostOf, host_names
from megatrain_dashboard.sources.protocol import JobSource
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.store.daemon_state import DaemonState
from megatrain_diagnostics.store.rounds_and_hosts import last_rounds, newest_clocks, rounds_of_host
from megatrain_job.failures.culprit import NO_CULPRIT, culprit_of_incident
from megatrain_job.jobs.host_view import HostView, host_views
from megatrain_job.jobs.snapshot import JobSnapshot

_RECORDED = "recorded"
"""State of a host that is known only from events."""
_MAX_INCIDENTS = 200
_FRESH_S = 1.0
_MAX_NAMED = 8


class HostDocument(Document):
    host: str
    state: str
    is_in_order: bool
    is_driver: bool
    remark: str
    address: str
    hardware: str
    labels: dict[str, str]
    first_rank: int | None
    num_workers: int | None
    step: int | None
    median_step_s: float | None
    last_step_unix_s: float | None
    joined_unix_s: float | None
    straggler_score: float | None
    clock_offset_s: float | None
    """Seconds by which the host's clock is ahead of the daemon's, with an error of at most clock_error_s."""
    clock_error_s: float | None
    cordon_reason: str
    cordon_by: str
    cordon_unix_s: float | None
    is_connected: bool | None
    """Whether events of the host arrive; null: not known."""


class CheckDocument(Document):
    name: str
    outcome: str
    detail: str
    duration_s: float
    value: float | None
    unit: str


class HostsDocument(Document):
    """The response of /hosts: the round's hosts first. `thresholds` of `straggler_score`; null: not judged."""

    hosts: tuple[HostDocument, ...]
    thresholds: ThresholdsDocument | None


class HostHistoryDocument(Document):
    """The response of /hosts/{host}."""

    host: HostDocument
    checks: tuple[CheckDocument, ...]
    checks_unix_s: float | None
    incident_ids: tuple[str, ...]
    """Incidents whose culprit is the host or a rank of it, the newest first."""
    victim_incident_ids: tuple[str, ...]
    """Incidents with another culprit, or without one, in which workers of the host ended; the newest first."""
    rounds: tuple[int, ...]
    """The rounds that the host took part in."""


@dataclass(frozen=True, slots=True)
class HostInputs:
    """The data of hosts.

    `clocks`: by host, (offset, error) in seconds of the newest comparison. `last_rounds`: by host, the newest round in
    which its ranks reported. `roster`: the ranks of the round that is shown, if there is no snapshot.
    """

    snapshot: JobSnapshot | None = None
    roster: Roster | None = None
    state: DaemonState | None = None
    clocks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    last_rounds: Mapping[str, int] = field(default_factory=dict)

    @property
    def judged(self) -> DaemonState | None:
        """The daemon's state for the round that is shown; None where it judged another round."""
        number = None if self.roster is None else self.roster.round
        if self.snapshot is not None:
            number = None if self.snapshot.newest_round is None else self.snapshot.newest_round.number
        return self.state if self.state is not None and self.state.round == number else None

    def score_of(self, host: str) -> float | None:
        """Return the straggler score of a host; None where the daemon did not judge it."""
        return None if self.judged is None else self.judged.host_scores.get(host)


def hosts_document(given: HostInputs) -> HostsDocument:
    """Return all hosts: those of the round first, by rank; then registered, cordoned or earlier ones, by name."""
    judged = given.judged
    thresholds = None if judged is None else thresholds_document(judged.thresholds)
    if given.snapshot is not None:
        live = tuple(_document(view, given) for view in host_views(given.snapshot))
        return HostsDocument(hosts=live, thresholds=thresholds)
    shown = _by_first_rank(given.roster)
    gone = sorted(given.last_rounds.keys() - {host for host, _ in shown}, key=natural_order)
    all_hosts: list[tuple[str, list[int]]] = [*shown, *((host, []) for host in gone)]
    return HostsDocument(hosts=tuple(_recorded(host, ranks, given) for host, ranks in all_hosts), thresholds=thresholds)


def host_history_document(
    host: HostDocument,
    report: CheckReport | None,
    incidents: Iterable[Incident],
    rounds: Iterable[int],
    host_of: HostOf,
) -> HostHistoryDocument:
    """Return the history of one host. `rounds`: the rounds that the host took part in."""
    blaming: list[str] = []
    others: list[str] = []
    for incident in incidents:
        if blames_host(incident, host.host, host_of):
            blaming.append(incident.incident_id)
        elif any(host_of(incident.round, failure.rank) == host.host for failure in incident.failures):
            others.append(incident.incident_id)
    return HostHistoryDocument(
        host=host,
        checks=() if report is None else tuple(map(CheckDocument.of, report.results)),
        checks_unix_s=None if report is None else report.at_unix_s,
        incident_ids=tuple(sorted(blaming, reverse=True)[:_MAX_INCIDENTS]),
        victim_incident_ids=tuple(sorted(others, reverse=True)[:_MAX_INCIDENTS]),
        rounds=tuple(sorted(set(rounds))),
    )


def blames_host(incident: Incident, host: str, host_of: HostOf) -> bool:
    """Return whether the culprit of an incident is a host, or a rank of this host."""
    culprit = culprit_of_incident(incident) or NO_CULPRIT
    if culprit.hosts:
        return host in culprit.hosts
    return any(host_of(incident.round, rank) == host for rank in culprit.ranks)


def _by_first_rank(roster: Roster | None) -> list[tuple[str, list[int]]]:
    ranks_of: dict[str, list[int]] = {}
    for rank, host in sorted(roster.hosts.items()) if roster is not None else ():
        ranks_of.setdefault(host, []).append(rank)
    return sorted(ranks_of.items(), key=lambda item: (item[1][0], natural_order(item[0])))


def _document(view: HostView, given: HostInputs) -> HostDocument:
    record, status, part, cordon = view.record, view.status, view.part, view.cordon
    offset = given.clocks.get(view.host)
    return HostDocument.of(
        view,
        address="" if record is None else record.address,
        hardware="" if record is None else record.hardware,
        labels={} if record is None else dict(record.labels),
        first_rank=None if part is None else part.first_rank,
        num_workers=part.num_workers if part is not None else None if record is None else record.num_workers,
        step=None if status is None else status.min_step,
        median_step_s=None if status is None else status.median_step_s,
        last_step_unix_s=None if status is None else status.last_step_unix_s,
        joined_unix_s=None if record is None else record.joined_unix_s,
        straggler_score=given.score_of(view.host),
        clock_offset_s=None if offset is None else offset[0],
        clock_error_s=None if offset is None else offset[1],
        cordon_reason="" if cordon is None else cordon.reason,
        cordon_by="" if cordon is None else cordon.by,
        cordon_unix_s=None if cordon is None else cordon.created_unix_s,
        is_connected=view.host in given.state.connected_hosts if given.state and given.snapshot else None,
    )


def _recorded(host: str, ranks: list[int], given: HostInputs) -> HostDocument:
    part = RoundHost(host, "", "", ranks[0], len(ranks)) if ranks else None
    found = _document(HostView(host, _RECORDED, part), given)
    return found if ranks else found.model_copy(update={"remark": f"last in round {given.last_rounds[host]}"})


def router(parts: DashboardParts) -> APIRouter:
    """Return the routes that answer with the state of all hosts, and with the state and history of one host."""
    routes = APIRouter(tags=["hosts"])
    source = parts.source

    def all_hosts() -> HostsDocument:
        return hosts_document(_inputs(source, parts.clock()))

    @routes.get("/hosts", response_model=HostsDocument)
    def hosts(request: Request) -> Response:
        """Return the state of every host of the job.

        The hosts of the newest round come first, in the order of their ranks. Hosts that are registered, cordoned or
        took part in an earlier round follow, by name.
        """
        version = source.live().versions["hosts"]
        key = ("hosts", version) if source.is_recorded else ("hosts",)
        return parts.responses.answer(request, key, all_hosts, fresh_s=_FRESH_S)

    @routes.get("/hosts/{host}", response_model=HostHistoryDocument)
    def host(host: Annotated[str, Path(max_length=256)]) -> Response:
        """Return the state of one host, its rounds, the results of its health checks, and its incidents.

        `incident_ids` names the incidents that blame the host, `victim_incident_ids` those in which its ranks failed
        but another host is to blame.
        """
        found = {document.host: document for document in all_hosts().hosts}
        if host not in found:
            names = names_text(list(found), _MAX_NAMED) or "none"
            raise not_found(f"host {shown(host)}: no such host; the job has {len(found):,}: {names}")
        facts = source.facts()
        return document_response(
            host_history_document(
                found[host], facts.checks.get(host), facts.incidents, _rounds(source, host),
                host_names(source, facts.incidents),
            )
        )  # fmt: skip

    return routes


def _inputs(source: JobSource, now_s: float) -> HostInputs:
    try:
        clocks = newest_clocks(source.events, None if source.is_recorded else int(now_s * 1e9))
    except DataError:
        clocks = {}
    roster, rounds = _kept(source)
    return HostInputs(source.snapshot(), roster, source.daemon_state(), clocks, rounds)


def _kept(source: JobSource) -> tuple[Roster | None, Mapping[str, int]]:
    """Return the roster and the last round of each host from events, where etcd has no state of the job."""
    if source.snapshot() is not None:
        return None, {}
    try:
        return source.roster(None), last_rounds(source.events)
    except DataError:
        return None, {}


def _rounds(source: JobSource, host: str) -> set[int]:
    """Return the rounds that a host took part in, from events and etcd."""
    snapshot = source.snapshot()
    rounds = () if snapshot is None else snapshot.rounds.values()
    found = {round_.number for round_ in rounds if any(part.host == host for part in round_.hosts)}
    try:
        return found | set(rounds_of_host(source.events, host))
    except DataError:
        return found
