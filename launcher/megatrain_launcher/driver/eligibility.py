"""Which registered hosts may take part in the next round. Pure functions: no I/O and no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.contracts.natural_order import natural_order
from megatrain.contracts.records.host_records import CheckReport, HostPhase, HostRecord
from megatrain.contracts.records.incident import Incident
from megatrain.contracts.records.job_requests import RequestKind
from megatrain.contracts.records.rounds import Round
from megatrain.formatting import count_text
from megatrain_launcher.driver.incidents import CHECK_NOTE
from megatrain_launcher.driver.policy import CHECK_TIMEOUT_S, Policy
from megatrain_launcher.driver.state import ClusterState

_BUSY_PHASES = (HostPhase.STARTING, HostPhase.RUNNING, HostPhase.STOPPING)


@dataclass(frozen=True, slots=True)
class Eligible:
    """The registered hosts that may take part, and the others with the reason why they may not."""

    available: Mapping[str, HostRecord]
    refused: Mapping[str, str]


def eligible(now: float, state: ClusterState, policy: Policy, previous: Round | None) -> Eligible:
    """Divide the registered hosts into available and refused ones.

    `previous`: the newest round. Whether its members still have workers is not checked here; the caller checks that.
    """
    fenced = {session for round_ in state.rounds.values() for session in round_.fenced}
    members = {part.session for part in previous.hosts} if previous is not None else set()
    last_round_of = {part.session: number for number in sorted(state.rounds) for part in state.rounds[number].hosts}
    checked = _checks_pending(now, state)
    evicted = {request.host: request.by for request in state.requests.values() if request.kind is RequestKind.EVICT}
    available: dict[str, HostRecord] = {}
    refused: dict[str, str] = {}
    for host in sorted(state.hosts, key=natural_order):
        record = state.hosts[host]
        reason = _refusal(state, policy, record) or checked.get(host, "")
        if not reason and host in evicted:
            reason = f"{evicted[host]} requested its eviction"
        if not reason and record.session in fenced:
            number = last_round_of.get(record.session)
            which = "an older round" if number is None else f"round {number}"
            reason = f"it has not reported that the workers of {which} have exited; its executor must restart"
        if not reason and record.session not in members:
            reason = _busy_with(state, record, last_round_of.get(record.session, 0))
        if reason:
            refused[host] = reason
        else:
            available[host] = record
    return Eligible(available, refused)


def _refusal(state: ClusterState, policy: Policy, record: HostRecord) -> str:
    if not record.is_fit:
        return f"it is unfit: {record.unfit_reason or 'its checks failed'}"
    if record.host in state.cordons:
        return f"it is cordoned: {state.cordons[record.host].reason}"
    if record.num_workers != policy.num_workers:
        return f"it has {count_text(record.num_workers, 'worker')}, but the job needs {policy.num_workers} per host"
    if state.job is not None and record.config_hash != state.job.config_hash:
        return "its configuration differs from the job's"
    return ""


def _checks_pending(now: float, state: ClusterState) -> dict[str, str]:
    """Return, for each host that must pass checks, why it may not take part yet (empty if it may).

    Only the newest incident that requests checks of a host counts.
    """
    found: dict[str, str] = {}
    asking = [incident for incident in state.incidents.values() if incident.notes.get(CHECK_NOTE)]
    for incident in sorted(asking, key=state.opened, reverse=True):
        for host in incident.notes[CHECK_NOTE].split(","):
            found.setdefault(host, _check_pending(now, state, incident, host))
    return found


def _check_pending(now: float, state: ClusterState, incident: Incident, host: str) -> str:
    report = state.checks.get((incident.incident_id, host))
    if report is not None and report.failed and not _has_passed_since(state, host, report):
        return f"it failed its check: {report.failed[0].name}: {report.failed[0].detail}"
    # measured from when this driver saw the halt, because the incident's times may be of another driver's clock
    asked_s = now - state.since(state.keys.halt(incident.round))
    if report is not None or asked_s > CHECK_TIMEOUT_S or not state.is_of_this_launch(incident):
        return ""
    return f"its check after incident {incident.incident_id} is under way"


def _has_passed_since(state: ClusterState, host: str, failed: CheckReport) -> bool:
    """Return whether a host passed a later check, such as one that a person requested after a repair."""
    return any(
        report.is_fit and report.at_unix_s > failed.at_unix_s
        for (_, name), report in state.checks.items()
        if name == host and not any(result.partner for result in report.results)
    )


def _busy_with(state: ClusterState, record: HostRecord, last_round: int) -> str:
    """Return why a host may still have workers; empty if it has none.

    `last_round`: the newest readable round with this session; 0 if there is none.
    """
    status = state.statuses.get(record.host)
    is_current = status is not None and status.session == record.session
    if last_round:
        part = state.rounds[last_round].part_of(record.host, record.session)
        is_idle = part is not None and state.has_left_round(part, last_round)
        return "" if is_idle else f"it may still have workers of round {last_round}"
    if status is not None and is_current and status.phase in _BUSY_PHASES:
        return f"it has workers of round {status.round}"
    return ""
