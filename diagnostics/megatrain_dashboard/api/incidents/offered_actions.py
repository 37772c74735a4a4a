"""Actions that make sense in an incident, given the job's current state. The handler checks each action again. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState
from megatrain_dashboard.actions.document import ActionKind
from megatrain_job.jobs.snapshot import JobSnapshot

_OF_HOSTS = (IncidentKind.FAILURE, IncidentKind.HANG, IncidentKind.HOST_LOST, IncidentKind.STRAGGLER)
_MAX_HOSTS = 4
"""A fault that affects more hosts is not a fault of the hosts."""

KindAndTarget = tuple[ActionKind, str]
"""Kind and target of an action."""


def offered_actions(incident: Incident, snapshot: JobSnapshot | None) -> tuple[KindAndTarget, ...]:
    """Return kinds and targets of actions; none for a job that is over or recorded, or that needs no action."""
    if snapshot is None or snapshot.end is not None or snapshot.newest_round is None:
        return ()
    return tuple(_offered(incident, snapshot))


def _offered(incident: Incident, snapshot: JobSnapshot) -> Iterator[KindAndTarget]:
    waiting = [outcome.verdict_id for outcome, _ in snapshot.waiting]
    if incident.verdict in waiting:
        yield "approve", incident.verdict
        yield "dismiss", incident.verdict
    if incident.state is IncidentState.HELD:
        # a checkpoint that is saved now is not lost if the control plane does not return
        yield "checkpoint", ""
    if incident.kind in _OF_HOSTS and len(incident.culprit_hosts) <= _MAX_HOSTS:
        for host in incident.culprit_hosts:
            yield from _of_host(host, snapshot, is_open=incident.state is IncidentState.OPEN)
    if incident.kind is IncidentKind.NUMERICS and incident.state is IncidentState.RECOVERED:
        yield "stop", ""


def _of_host(host: str, snapshot: JobSnapshot, *, is_open: bool) -> Iterator[KindAndTarget]:
    newest = snapshot.newest_round
    if host in snapshot.cordons:
        yield "uncordon", host
        return
    is_in_round = newest is not None and any(part.host == host for part in newest.hosts)
    if is_in_round and not is_open:
        yield "evict", host
    if is_in_round or host in snapshot.hosts:
        yield "cordon", host
