"""The results of requests that are in progress: of their commands, pair tests and incidents.

Pure functions: no I/O and no clock.
"""

from __future__ import annotations

from megatrain.contracts.records.host_records import HostRecord
from megatrain.contracts.records.incident import Incident, IncidentState
from megatrain.contracts.records.job_requests import JobRequest, RequestKind
from megatrain.contracts.records.rounds import HostCommand
from megatrain.formatting import count_text, names_text
from megatrain_launcher.driver.pair_checks import PairCheck, findings_text
from megatrain_launcher.driver.ranks import topology_key
from megatrain_launcher.driver.state import ClusterState


def hosts_to_pair(state: ClusterState, request: JobRequest) -> list[HostRecord]:
    """Return the hosts for the pair tests of a check: all idle hosts, or the checked host and its two neighbors."""
    live = state.round if state.round is not None and state.round.number not in state.halts else None
    training = {part.host for part in live.hosts} if live is not None else set()
    idle = sorted((record for host, record in state.hosts.items() if host not in training), key=topology_key)
    if not request.host:
        return idle
    index = next((number for number, record in enumerate(idle) if record.host == request.host), None)
    if index is None:
        return []
    near = {(index + step) % len(idle) for step in (-1, 0, 1)}
    return [record for number, record in enumerate(idle) if number in near]


def pairs_result(tests: PairCheck) -> str:
    """Return the findings of pair tests, or why there are none."""
    if tests.waiting:
        return f"pair tests did not finish: {tests.waiting}"
    if not tests.num_pairs:
        return "no pair tests: fewer than two hosts are idle"
    return findings_text(tests.findings) or f"{count_text(tests.num_pairs, 'pair')} of idle hosts passed"


def command_result(state: ClusterState, request: JobRequest, command: HostCommand) -> str:
    """Return the result of a command; empty while hosts still carry it out."""
    if request.kind is RequestKind.CHECK:
        reports = {host: state.checks.get((request.request_id, host)) for host in command.hosts}
        if any(report is None for host, report in reports.items() if host in state.hosts):
            return ""
        failed = [
            f"{host}: {report.failed[0].name}: {report.failed[0].detail}"
            for host, report in reports.items()
            if report and report.failed
        ]
        gone = [f"{host} left the job" for host, report in reports.items() if report is None]
        return "; ".join((*failed, *gone)) or f"all checks passed on {names_text(command.hosts, most=8)}"
    waiting = [
        host
        for host in command.hosts
        if host in state.hosts
        and ((status := state.statuses.get(host)) is None or status.completed_command < command.number)
    ]
    return "" if waiting else "all hosts have completed the command to save"


def incident_result(incident: Incident) -> str:
    """Return the result of a request that halted a round; empty until the next round trains."""
    if incident.state is IncidentState.OPEN:
        return ""
    if incident.state is IncidentState.RECOVERED:
        return f"done: round {incident.next_round} trains; see incident {incident.incident_id}"
    return "the job is over"
