"""What people asked for: answers, and the halts, cordons and commands that follow. Pure.

A request stays in etcd until its last answer, so that whoever drives can go on with it. What is under way is known from
what it left: a command or an incident that names it.
"""

from __future__ import annotations

from dataclasses import replace

from megatrain.contracts.incident import Incident, IncidentKind, IncidentState
from megatrain.contracts.job_requests import Answer, JobRequest, RequestKind
from megatrain.contracts.rounds import Cordon, HostCommand, JobEnd, Round
from megatrain_launcher.driver.actions import (
    Action,
    AnswerRequest,
    CordonHost,
    EndJob,
    OpenIncident,
    SendCommand,
    UpdateIncident,
)
from megatrain_launcher.driver.breaking import halt
from megatrain_launcher.driver.incidents import EXIT_CODE_NOTE, REQUEST_NOTE, ended, new_incident
from megatrain_launcher.driver.policy import REQUEST_TIMEOUT_S
from megatrain_launcher.driver.responses import EVICT, RESTART, STOP
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.texts import natural_order


def answer_requests(now: float, state: ClusterState, *, is_quiet: bool) -> tuple[Action, ...]:
    """Return what follows from the oldest request that something can be done about.

    `is_quiet`: nothing else is decided at this moment; only then a request may change anything.
    """
    for request_id in sorted(state.requests, key=lambda one: (state.requests[one].created_unix_s, one)):
        request = state.requests[request_id]
        actions = _follow(now, state, request)
        if actions is None and is_quiet:
            actions = _begin(now, state, request)
        if actions:
            return actions
    return ()


def refuse_all(now: float, state: ClusterState, reason: str) -> tuple[Action, ...]:
    """Return answers to all requests of a job that is over."""
    found = state.requests.values()
    return tuple(
        _answer(now, one, reason, is_accepted=one.kind is RequestKind.STOP, is_done=True) for one in found
    )  # fmt: skip


def _answer(
    now: float, request: JobRequest, text: str, *, is_accepted: bool = True, is_done: bool = False
) -> AnswerRequest:
    return AnswerRequest(Answer(request.request_id, is_accepted, is_done, text, now))


def _follow(now: float, state: ClusterState, request: JobRequest) -> tuple[Action, ...] | None:
    """Go on with a request that was begun; None: it was not."""
    command = next((one for one in state.commands.values() if one.request == request.request_id), None)
    incident = next(
        (one for one in state.incidents.values() if one.notes.get(REQUEST_NOTE) == request.request_id), None
    )  # fmt: skip
    if command is None and incident is None:
        return None
    if command is not None:
        text = _command_result(state, request, command)
    else:
        assert incident is not None
        text = _incident_result(incident)
    if text:
        return (_answer(now, request, text, is_done=True),)
    if now - state.since(state.keys.request(request.request_id), now) > REQUEST_TIMEOUT_S:
        return (_answer(now, request, f"nothing came of it within {REQUEST_TIMEOUT_S:g} s", is_done=True),)
    return ()


def _command_result(state: ClusterState, request: JobRequest, command: HostCommand) -> str:
    """Return what became of a command, empty while it is under way."""
    if request.kind is RequestKind.CHECK:
        reports = {host: state.checks.get((request.request_id, host)) for host in command.hosts}
        if any(report is None for host, report in reports.items() if host in state.hosts):
            return ""
        failed = [
            f"{host}: {one.failed[0].name}: {one.failed[0].detail}"
            for host, one in reports.items()
            if one and one.failed
        ]
        gone = [f"{host} left" for host, one in reports.items() if one is None]
        return "; ".join((*failed, *gone)) or f"all checks passed on {', '.join(command.hosts)}"
    waiting = [
        host
        for host in command.hosts
        if host in state.hosts and ((one := state.statuses.get(host)) is None or one.obeyed_command < command.number)
    ]
    return "" if waiting else "the workers were told to save at the next step that all agree on"


def _incident_result(incident: Incident) -> str:
    if incident.state is IncidentState.OPEN:
        return ""
    if incident.state is IncidentState.RECOVERED:
        return f"done: round {incident.next_round} trains; see incident {incident.incident_id}"
    return "the job is over"


def _begin(now: float, state: ClusterState, request: JobRequest) -> tuple[Action, ...]:
    round_ = state.round
    live = round_ if round_ is not None and round_.number not in state.halts else None
    match request.kind:
        case RequestKind.EVICT:
            return _evict(now, state, request, live)
        case RequestKind.CHECK:
            return _check(now, state, request)
        case RequestKind.STOP if live is None:
            closed = tuple(UpdateIncident(ended(one, is_recovered=False)) for one in state.open_incidents())
            end = EndJob(JobEnd(request.exit_code, f"{request.by} stopped the job", now, 0))
            return (*closed, end, _answer(now, request, "the job is over; nothing was training", is_done=True))
        case _ if live is None:
            text = "nothing trains at the moment: there is nothing to save or to restart"
            return (_answer(now, request, text, is_accepted=False, is_done=True),)
        case RequestKind.CHECKPOINT:
            hosts = tuple(part.host for part in live.hosts)
            command = SendCommand(_command(now, state, "checkpoint", hosts, request))
            return (command, _answer(now, request, "asked all hosts to save"))
        case RequestKind.RESTART:
            return _halt_for(now, state, request, live, RESTART, "saving, then a new round begins")
        case RequestKind.STOP:
            return _halt_for(now, state, request, live, STOP, "saving, then the job ends")


def _command(now: float, state: ClusterState, kind: str, hosts: tuple[str, ...], request: JobRequest) -> HostCommand:
    number = max(state.commands, default=0) + 1
    return HostCommand(number, kind, hosts, request.request_id, created_unix_s=now)


def _check(now: float, state: ClusterState, request: JobRequest) -> tuple[Action, ...]:
    if request.host and request.host not in state.hosts:
        return (_answer(now, request, _unknown(state, request.host), is_accepted=False, is_done=True),)
    hosts = (request.host,) if request.host else tuple(sorted(state.hosts, key=natural_order))
    command = _command(now, state, "check", hosts, request)
    return (SendCommand(command), _answer(now, request, f"asked {len(hosts)} hosts to run their checks"))


def _evict(now: float, state: ClusterState, request: JobRequest, live: Round | None) -> tuple[Action, ...]:
    is_member = live is not None and any(part.host == request.host for part in live.hosts)
    if not request.host or (request.host not in state.hosts and not is_member):
        return (_answer(now, request, _unknown(state, request.host), is_accepted=False, is_done=True),)
    reason = request.reason or f"evicted by {request.by}"
    cordon = CordonHost(Cordon(request.host, reason, request.by, now))
    if live is None or not is_member:
        return (cordon, _answer(now, request, f"{request.host} is cordoned; it was not training", is_done=True))
    return (cordon, *_halt_for(now, state, request, live, EVICT, f"saving, then a round without {request.host}"))


def _halt_for(
    now: float, state: ClusterState, request: JobRequest, live: Round, action: str, text: str
) -> tuple[Action, ...]:
    """Open the request's incident and halt the round, with time to save."""
    why = f": {request.reason}" if request.reason else ""
    host = f" {request.host}" if request.host else ""
    reason = f"{request.by} asked for {request.kind}{host}{why}"
    incident = new_incident(
        now, state, IncidentKind.REQUEST, round_=live, began=now, reason=reason, action=action
    )  # fmt: skip
    hosts = (request.host,) if action == EVICT else ()
    notes = {REQUEST_NOTE: request.request_id, EXIT_CODE_NOTE: str(request.exit_code)}
    incident = replace(incident, culprit_hosts=hosts, notes={**incident.notes, **notes})
    halted = halt(now, live, reason, is_saving=True, incident=incident.incident_id)
    return (OpenIncident(incident), halted, _answer(now, request, text))


def _unknown(state: ClusterState, host: str) -> str:
    known = ", ".join(sorted(state.hosts, key=natural_order)[:16]) or "none"
    return f"no host {host!r} is registered; registered: {known}"
