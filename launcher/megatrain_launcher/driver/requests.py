"""Handles the requests of people: answers them, and derives halts, cordons and commands. Pure functions: no I/O and no
clock.

A request stays in etcd until its final answer, so that a new driver can continue it. A request is in progress if a
command or an incident names it, or if it has a first answer while a round is being stopped. A request to restart is
fulfilled by any round that is written after it.
"""

from __future__ import annotations

from dataclasses import replace

from megatrain.contracts.exit_codes import GOOD_ENDS
from megatrain.contracts.natural_order import natural_order
from megatrain.contracts.records.host_records import HostPhase
from megatrain.contracts.records.incident import IncidentKind
from megatrain.contracts.records.job_requests import Answer, JobRequest, RequestKind
from megatrain.contracts.records.rounds import Cordon, HostCommand, JobEnd, Round
from megatrain.formatting import count_text, names_text
from megatrain_launcher.driver.actions import (
    AnswerRequest,
    CordonHost,
    DriverAction,
    EndJob,
    OpenIncident,
    SendCommand,
)
from megatrain_launcher.driver.breaking import halt
from megatrain_launcher.driver.evictions import EvictionReason
from megatrain_launcher.driver.incidents import EXIT_CODE_NOTE, REQUEST_NOTE, end_all, new_incident, statuses_in
from megatrain_launcher.driver.live_round import unsaved
from megatrain_launcher.driver.pair_checks import follow_pairs
from megatrain_launcher.driver.policy import REQUEST_TIMEOUT_S, Policy
from megatrain_launcher.driver.request_results import command_result, hosts_to_pair, incident_result, pairs_result
from megatrain_launcher.driver.response import EVICT, RESTART, STOP
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.driver.verdicts import decided_by_person


def answer_requests(now: float, state: ClusterState, policy: Policy, *, is_quiet: bool) -> tuple[DriverAction, ...]:
    """Return the actions for the oldest request that can be handled now.

    `is_quiet`: the current decision has no other action that changes the job. Otherwise a request is only answered.
    """
    for request in _by_age(state):
        actions = _follow(now, state, policy, request, is_quiet=is_quiet)
        if actions is None and is_quiet:
            actions = _begin(now, state, policy, request)
        if actions:
            return actions
    return ()


def asked_to_stop(state: ClusterState) -> JobRequest | None:
    """Return the oldest request to stop the job; None if there is none."""
    return next((request for request in _by_age(state) if request.kind is RequestKind.STOP), None)


def answer_all(now: float, state: ClusterState, end: JobEnd) -> tuple[DriverAction, ...]:
    """Return final answers to all requests of an ended job: all are refused, except a stop if the job ended well."""
    text = f"the job is over: {end.reason}"
    is_good = end.exit_code in GOOD_ENDS
    return tuple(
        _answer(now, request, text, is_accepted=is_good and request.kind is RequestKind.STOP, is_done=True)
        for request in state.requests.values()
    )


def _by_age(state: ClusterState) -> list[JobRequest]:
    """Return the requests, oldest first. Ordered by revision, because clocks of machines differ."""
    return sorted(
        state.requests.values(),
        key=lambda request: (state.created(state.keys.request(request.request_id)), request.request_id),
    )


def _answer(
    now: float, request: JobRequest, text: str, *, is_accepted: bool = True, is_done: bool = False
) -> AnswerRequest:
    return AnswerRequest(Answer(request.request_id, is_accepted, is_done, text, now))


def _refuse(now: float, request: JobRequest, text: str) -> tuple[DriverAction, ...]:
    return (_answer(now, request, text, is_accepted=False, is_done=True),)


def _follow(
    now: float, state: ClusterState, policy: Policy, request: JobRequest, *, is_quiet: bool
) -> tuple[DriverAction, ...] | None:
    """Return the actions for a request that is in progress; None if it has not begun."""
    command = next((command for command in state.commands.values() if command.request == request.request_id), None)
    incident = next(
        (incident for incident in state.incidents.values() if incident.notes.get(REQUEST_NOTE) == request.request_id),
        None,
    )
    if command is not None:
        text = command_result(state, request, command)
        if text and request.kind is RequestKind.CHECK and policy.has_pair_checks:
            tests = follow_pairs(now, state, policy, request.request_id, hosts_to_pair(state, request))
            if tests.waiting and not _is_overdue(now, state, request):
                return tests.actions if is_quiet else ()
            text = f"{text}; {pairs_result(tests)}"
    elif incident is not None:
        text = incident_result(incident)
    else:
        return None
    if text:
        return (_answer(now, request, text, is_done=True),)
    if _is_overdue(now, state, request):
        return _refuse(now, request, f"the request was not completed within {REQUEST_TIMEOUT_S:g} s")
    return ()


def _is_overdue(now: float, state: ClusterState, request: JobRequest) -> bool:
    return now - state.since(state.keys.request(request.request_id), now) > REQUEST_TIMEOUT_S


def _begin(now: float, state: ClusterState, policy: Policy, request: JobRequest) -> tuple[DriverAction, ...]:
    round_ = state.round
    if request.kind in (RequestKind.APPROVE, RequestKind.DISMISS):
        return _about_verdict(now, state, policy, request)
    if request.kind is RequestKind.EVICT:
        return _evict(now, state, request)
    if request.kind is RequestKind.CHECK:
        return _check(now, state, request)
    if round_ is None:
        return _without_round(now, state, request)
    if round_.number in state.halts:
        return _while_stopping(now, state, request, round_)
    match request.kind:
        case RequestKind.CHECKPOINT:
            hosts = tuple(part.host for part in round_.hosts)
            command = SendCommand(_command(state, "checkpoint", hosts, request))
            return (command, _answer(now, request, "asked all hosts to save"))
        case RequestKind.RESTART if _is_newer(state, round_, request):
            return _await_training(now, state, request, round_)
        case RequestKind.RESTART if at_risk := unsaved(state, round_):
            text = f"{at_risk}; fix that first: a restart would depend on the hosts' memory alone"
            return _refuse(now, request, text)
        case RequestKind.RESTART:
            return _halt_for(now, state, request, round_, RESTART, "saving, then a new round begins")
        case _:
            return _halt_for(now, state, request, round_, STOP, "saving, then the job ends")


def _without_round(now: float, state: ClusterState, request: JobRequest) -> tuple[DriverAction, ...]:
    if request.kind is not RequestKind.STOP:
        return _refuse(now, request, "no round is running: there is nothing to save or to restart")
    end = EndJob(JobEnd(request.exit_code, f"{request.by} stopped the job", now, 0))
    done = _answer(now, request, "the job is over; no round was running", is_done=True)
    return (*end_all(state.open_incidents()), end, done)


def _while_stopping(now: float, state: ClusterState, request: JobRequest, round_: Round) -> tuple[DriverAction, ...]:
    """Answer a request that arrives while its round is being stopped."""
    number, is_saving, doing = round_.number, state.halts[round_.number].is_saving, _stopping_text(state, round_)
    match request.kind:
        case RequestKind.RESTART:
            return _answer_waiting(now, state, request, f"round {number} {doing} already; then a new one begins")
        case RequestKind.STOP:
            return _answer_waiting(now, state, request, f"round {number} {doing}; then the job ends")
        case _ if is_saving:
            text = f"round {number} already saves and stops; request a checkpoint again when the next round trains"
            return (_answer(now, request, text, is_done=True),)
        case _:
            text = f"round {number} is being stopped: there is nothing to save before the next round trains"
            return _refuse(now, request, text)


def _stopping_text(state: ClusterState, round_: Round) -> str:
    return "saves and stops" if state.halts[round_.number].is_saving else "is being stopped"


def _answer_waiting(now: float, state: ClusterState, request: JobRequest, text: str) -> tuple[DriverAction, ...]:
    """Return one answer that names what the request waits for; nothing if there is an answer already."""
    if _is_overdue(now, state, request):
        return _refuse(now, request, f"the request was not completed within {REQUEST_TIMEOUT_S:g} s: {text}")
    return () if request.request_id in state.answers else (_answer(now, request, text),)


def _is_newer(state: ClusterState, round_: Round, request: JobRequest) -> bool:
    """Return whether a round was written after the request."""
    own, asked = (
        state.seen.get(key) for key in (state.keys.round(round_.number), state.keys.request(request.request_id))
    )
    return own is not None and asked is not None and own.create_revision > asked.create_revision


def _await_training(now: float, state: ClusterState, request: JobRequest, round_: Round) -> tuple[DriverAction, ...]:
    found = statuses_in(state, round_)
    if len(found) == len(round_.hosts) and all(status.phase is HostPhase.RUNNING for status in found):
        text = f"done: round {round_.number} trains; it began after this request"
        return (_answer(now, request, text, is_done=True),)
    return _answer_waiting(now, state, request, f"round {round_.number} begins")


def _command(state: ClusterState, kind: str, hosts: tuple[str, ...], request: JobRequest) -> HostCommand:
    return HostCommand(state.next_command, kind, hosts, request.request_id)


def _check(now: float, state: ClusterState, request: JobRequest) -> tuple[DriverAction, ...]:
    if request.host and request.host not in state.hosts:
        return _refuse(now, request, _unknown(state, request.host))
    hosts = (request.host,) if request.host else tuple(sorted(state.hosts, key=natural_order))
    command = _command(state, "check", hosts, request)
    text = f"asked {count_text(len(hosts), 'host')} to run {'its' if len(hosts) == 1 else 'their'} checks"
    return (SendCommand(command), _answer(now, request, text))


def _evict(now: float, state: ClusterState, request: JobRequest) -> tuple[DriverAction, ...]:
    """Cordon a host and remove it from the live round."""
    host, round_ = request.host, state.round
    is_member = round_ is not None and any(part.host == host for part in round_.hosts)
    if not host or (host not in state.hosts and not is_member and host not in state.cordons):
        return _refuse(now, request, _unknown(state, host))
    reason = request.reason or EvictionReason.REQUEST.text(person=request.by)
    cordon: tuple[DriverAction, ...] = ()
    if host not in state.cordons or request.request_id not in state.answers:
        cordon = (CordonHost(Cordon(host, reason, request.by, now)),)
    if round_ is None or not is_member:
        text = f"{host} is cordoned; it was not training"
        if round_ is not None and _is_newer(state, round_, request):
            text = f"done: {host} is cordoned, and round {round_.number} began without it"
        return (*cordon, _answer(now, request, text, is_done=True))
    if round_.number in state.halts:
        doing = _stopping_text(state, round_)
        text = f"{host} is cordoned; round {round_.number} {doing} already, and the next one begins without it"
        return (*cordon, *_answer_waiting(now, state, request, text))
    at_risk = unsaved(state, round_)
    if at_risk:
        text = f"{host} is cordoned and leaves when round {round_.number} ends; the round continues for now: {at_risk}"
        return (*cordon, _answer(now, request, text, is_done=True))
    return (*cordon, *_halt_for(now, state, request, round_, EVICT, f"saving, then a round without {host}"))


def _about_verdict(now: float, state: ClusterState, policy: Policy, request: JobRequest) -> tuple[DriverAction, ...]:
    reply = decided_by_person(now, state, policy, request)
    if not reply.is_done and not reply.actions:
        return _answer_waiting(now, state, request, reply.text)
    return (*reply.actions, _answer(now, request, reply.text, is_accepted=reply.is_accepted, is_done=reply.is_done))


def _halt_for(
    now: float, state: ClusterState, request: JobRequest, live: Round, action: str, text: str
) -> tuple[DriverAction, ...]:
    """Open an incident for the request and halt the round, with time to save."""
    why = f": {request.reason}" if request.reason else ""
    host = f" {request.host}" if request.host else ""
    reason = f"{request.by} requested {request.kind}{host}{why}"
    incident = new_incident(now, state, IncidentKind.REQUEST, round_=live, began=now, reason=reason, action=action)
    hosts = (request.host,) if action == EVICT else ()
    notes = {REQUEST_NOTE: request.request_id, EXIT_CODE_NOTE: str(request.exit_code)}
    incident = replace(incident, culprit_hosts=hosts, notes={**incident.notes, **notes})
    halted = halt(now, live, reason, is_saving=True, incident=incident.incident_id)
    return (OpenIncident(incident), halted, _answer(now, request, text))


def _unknown(state: ClusterState, host: str) -> str:
    known = sorted(state.hosts, key=natural_order)
    return f"no host {host!r} is registered; registered: {names_text(known, 16) or 'none'}"
