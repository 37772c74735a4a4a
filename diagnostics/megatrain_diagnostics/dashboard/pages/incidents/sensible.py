"""What a person can sensibly ask for in an incident, as the job stands now. The desk checks each wish anew. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.contracts.incident import Incident, IncidentKind, IncidentState
from megatrain.jobs.snapshot import JobSnapshot
from megatrain_diagnostics.dashboard.actions.document import ActionKind

_OF_HOSTS = (IncidentKind.FAILURE, IncidentKind.HANG, IncidentKind.HOST_LOST, IncidentKind.STRAGGLER)
_MOST_HOSTS = 4
"""More than that are no fault of hosts."""

Wish = tuple[ActionKind, str]
"""Kind and target."""


def sensible_actions(incident: Incident, snapshot: JobSnapshot | None) -> tuple[Wish, ...]:
    """Return kinds and targets; none of a job that is over, is recorded, or answers the incident by itself."""
    if snapshot is None or snapshot.end is not None or snapshot.newest_round is None:
        return ()
    return tuple(_wishes(incident, snapshot))


def _wishes(incident: Incident, snapshot: JobSnapshot) -> Iterator[Wish]:
    waiting = [outcome.verdict_id for outcome, _ in snapshot.waiting]
    if incident.verdict in waiting:
        yield "approve", incident.verdict
        yield "dismiss", incident.verdict
    if incident.state is IncidentState.HELD:
        # what is saved now is not lost when the control plane goes for good
        yield "checkpoint", ""
    if incident.kind in _OF_HOSTS and len(incident.culprit_hosts) <= _MOST_HOSTS:
        for host in incident.culprit_hosts:
            yield from _of_host(host, snapshot, is_open=incident.state is IncidentState.OPEN)
    if incident.kind is IncidentKind.NUMERICS and incident.state is IncidentState.RECOVERED:
        yield "stop", ""


def _of_host(host: str, snapshot: JobSnapshot, *, is_open: bool) -> Iterator[Wish]:
    newest = snapshot.newest_round
    if host in snapshot.cordons:
        yield "uncordon", host
        return
    is_in_round = newest is not None and any(part.host == host for part in newest.hosts)
    if is_in_round and not is_open:
        yield "evict", host
    if is_in_round or host in snapshot.hosts:
        yield "cordon", host
