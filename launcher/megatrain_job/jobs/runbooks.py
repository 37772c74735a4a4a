"""Which pages of docs/runbooks apply to an incident, for notifications and the page of the incident. Pure."""

from __future__ import annotations

from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState
from megatrain_job.failures.verdict import label_row

_OF_KIND = {
    IncidentKind.FAILURE: "worker-ended.md",
    IncidentKind.HANG: "hang.md",
    IncidentKind.HOST_LOST: "host-evicted-or-cordoned.md",
    IncidentKind.CONTROL_PLANE: "etcd.md",
    IncidentKind.STRAGGLER: "straggler.md",
    IncidentKind.NUMERICS: "numerics.md",
    IncidentKind.LAUNCH_LOST: "launch-lost.md",
}
"""A request has no page: it is no fault."""
_EVICTED = "host-evicted-or-cordoned.md"
_RESTART_LIMIT = "stopped-by-the-brake.md"


def runbooks_of(incident: Incident) -> tuple[str, ...]:
    """Return the pages for an incident, the one to begin with first; none if no action is needed."""
    found = [_OF_KIND[incident.kind]] if incident.kind in _OF_KIND else []
    if incident.kind is IncidentKind.FAILURE and (page := label_row(incident.label).runbook):
        found.insert(0, page)
    if incident.state is IncidentState.STOPPED and incident.kind is not IncidentKind.REQUEST:
        found.insert(0, _RESTART_LIMIT)
    if incident.action == "evict":
        found.append(_EVICTED)
    return tuple(dict.fromkeys(found))
