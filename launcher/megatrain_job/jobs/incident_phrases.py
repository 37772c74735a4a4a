"""Texts about an incident, the same in every command, on the dashboard and in notifications.

Phrases about the incident and the failures in it, and the pages of docs/runbooks that apply to it. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.contracts.exit_codes import end_text
from megatrain.contracts.records.host_records import RankFailure
from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState, phase_seconds
from megatrain.contracts.records.notices import Receipt
from megatrain.formatting import count_text, names_text, ranks_text, seconds_text
from megatrain_job.failures.culprit import is_victim
from megatrain_job.failures.verdict import label_row

KIND_TEXTS = {
    IncidentKind.FAILURE: "a worker ended",
    IncidentKind.HANG: "a hang",
    IncidentKind.HOST_LOST: "a host was lost",
    IncidentKind.REQUEST: "it was requested",
    IncidentKind.CONTROL_PLANE: "leases vanished while training went on",
    IncidentKind.STRAGGLER: "hosts made the job slow",
    IncidentKind.NUMERICS: "abnormal loss or gradients",
    IncidentKind.LAUNCH_LOST: "the previous launch died without recording an end",
}

_OF_KIND = {
    IncidentKind.FAILURE: "worker-ended.md",
    IncidentKind.HANG: "hang.md",
    IncidentKind.HOST_LOST: "host-evicted-or-cordoned.md",
    IncidentKind.CONTROL_PLANE: "etcd.md",
    IncidentKind.STRAGGLER: "straggler.md",
    IncidentKind.NUMERICS: "numerics.md",
    IncidentKind.LAUNCH_LOST: "launch-lost.md",
}
"""The runbook page of each kind. A request has no page, because it is not a fault."""
_EVICTED = "host-evicted-or-cordoned.md"
_RESTART_LIMIT = "stopped-by-the-brake.md"


def rank_end_text(failure: RankFailure) -> str:
    """Return "rank 3 was killed by SIGKILL (9)", its log's label and culprit, and whether it ended as a victim."""
    label = f": {failure.label}" if failure.label else ""
    names = f", which names {failure.culprit}" if failure.culprit else ""
    victim = ", because other workers had ended" if is_victim(failure) else ""
    return f"rank {failure.rank} {end_text(failure.exit_code)}{label}{names}{victim}"


def rank_and_end(failure: RankFailure, host: str | None) -> str:
    """Return "rank 3 on host-2 was killed by SIGKILL (9)", with the label of its log if it has one."""
    label = f", {failure.label}" if failure.label else ""
    return f"rank {failure.rank}{f' on {host}' if host else ''} {end_text(failure.exit_code)}{label}"


_STAGE_TEXTS = {"open": "that it began", "under-way": "that the job recovers", "closed": "that it is over"}


def receipt_text(receipt: Receipt) -> str:
    """Return "notified that it began", or "not notified that it began, after 3 tries: answers 404"."""
    what = _STAGE_TEXTS.get(receipt.stage, receipt.stage)
    if not receipt.problem:
        return f"notified {what}"
    return f"not notified {what}, after {count_text(receipt.num_failed, 'try', 'tries')}: {receipt.problem}"


def where_text(hosts: Sequence[str], ranks: Sequence[int]) -> str:
    """Return "host-2 (rank 3)", without unknown parts."""
    host_names, rank_names = names_text(hosts, most=4), ranks_text(ranks)
    return f"{host_names} ({rank_names})" if hosts and ranks else host_names or rank_names


def down_s(incident: Incident) -> float | None:
    """Return the seconds from the failure until a step was completed again; None before that."""
    first_step = incident.moments.first_step
    return None if first_step is None else max(0.0, first_step - incident.moments.began)


def cost_text(incident: Incident) -> str:
    """Return "3.2 s, 4 steps lost", without unknown parts."""
    lost = incident.steps_lost
    seconds = down_s(incident)
    texts = [
        "" if seconds is None else seconds_text(seconds),
        "" if lost is None else f"{count_text(lost, 'step')} lost",
    ]
    return ", ".join(text for text in texts if text)


def current_phase(incident: Incident) -> str:
    """Return the first phase of an incident's recovery that is not over; empty if all are over."""
    for phase, seconds in phase_seconds(incident.moments).items():
        if seconds is None:
            return phase_text(phase)
    return ""


def phase_text(phase: str) -> str:
    """Return the text for a phase of a recovery."""
    return phase.replace("_", " ")


def runbooks_of(incident: Incident) -> tuple[str, ...]:
    """Return the runbook pages for an incident, in the order to read them; none if no action is needed."""
    found = [_OF_KIND[incident.kind]] if incident.kind in _OF_KIND else []
    if incident.kind is IncidentKind.FAILURE and (page := label_row(incident.label).runbook):
        found.insert(0, page)
    if incident.state is IncidentState.STOPPED and incident.kind is not IncidentKind.REQUEST:
        found.insert(0, _RESTART_LIMIT)
    if incident.action == "evict":
        found.append(_EVICTED)
    return tuple(dict.fromkeys(found))
