"""From a halted round to the next one: wait until its workers are gone, judge what happened, form. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatrain.contracts.exit_codes import ExitCode, end_text
from megatrain.contracts.host_records import HostPhase, RankFailure
from megatrain.contracts.incident import Incident, IncidentKind
from megatrain.contracts.rounds import Cordon, Halt, HostCommand, JobEnd, Rollback, Round, RoundHost
from megatrain.failures.culprit import is_victim
from megatrain_launcher.driver.actions import (
    Action,
    CordonHost,
    Decision,
    EndJob,
    SendCommand,
    UpdateIncident,
    WriteRound,
)
from megatrain_launcher.driver.breaking import probes_for, telling
from megatrain_launcher.driver.fences import gone_by, grace_s
from megatrain_launcher.driver.forming import eligible, form
from megatrain_launcher.driver.incidents import (
    CHECK_NOTE,
    EXIT_CODE_NOTE,
    PAIRS_NOTE,
    ended,
    history_of,
    last_step,
    no_earlier,
    statuses_in,
)
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.requests import asked_to_stop
from megatrain_launcher.driver.responses import REQUEUE, STOP, Facts, Response, respond
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.driver.verdict_acts import released
from megatrain_launcher.executor.hearing import deaf_within_s


@dataclass(frozen=True, slots=True)
class Stopping:
    """How far a halted round is. `fenced`: hosts that will not be waited for, by session, and why."""

    pending: tuple[RoundHost, ...]
    unheard: Mapping[str, float]
    """The unreachable hosts among these, and until when their workers may live."""
    fenced: Mapping[str, str]
    lost: Mapping[str, str]
    """Hosts that are certainly gone, with the evidence."""
    left_out: Mapping[str, str]
    vanished: tuple[str, ...]
    """Those of the lost whose end nothing proves: they were waited out."""
    over_at: float
    """When the last host was waited out: from then on the next round waits for hosts."""


def follow_halt(now: float, state: ClusterState, policy: Policy, round_: Round, halt: Halt) -> Decision:
    """Return what to do now that a round is halted and no newer one is written."""
    is_old = state.is_of_older_launch(round_)  # what broke that launch says nothing of this one
    incident = None if is_old else state.incidents.get(halt.incident)
    since = state.since(state.keys.halt(round_.number), now)
    stopping = stopping_of(now, state, policy, round_, halt, since)
    if stopping.pending:
        return Decision(probes_for(now, state, stopping.pending), _waiting_words(now, round_, stopping))
    done = None if is_old else _done_code(state, round_)
    if done is not None:
        return _end(now, state, incident, done, "training is done", round_, is_recovered=True)
    is_stopping_job = incident is not None and incident.kind is IncidentKind.REQUEST and incident.action == STOP
    asked = None if is_stopping_job else asked_to_stop(state)
    if asked is not None:
        known = _completed(now, state, round_, incident) if incident is not None else None
        return _end(now, state, known, asked.exit_code, f"{asked.by} asked for {asked.kind}", round_)
    if incident is None:
        return form(
            now, state, policy, previous=round_, fenced=tuple(stopping.fenced), left_out=stopping.left_out,
            since=stopping.over_at, reason="the job begins" if is_old else halt.reason, vanished=stopping.vanished,
        )  # fmt: skip
    if incident.moments.halted is not None:
        return _form(now, state, policy, round_, stopping, incident, since, ())
    return _judge(now, state, policy, round_, stopping, incident, since)


def stopping_of(now: float, state: ClusterState, policy: Policy, round_: Round, halt: Halt, since: float) -> Stopping:
    """Return which hosts of a halted round are still waited for, and which are not and why."""
    timeout_s = policy.stop_timeout_s + (grace_s(state, policy, round_) if halt.is_saving else 0.0)
    pending: list[RoundHost] = []
    unheard: dict[str, float] = {}
    over_at = since
    fenced: dict[str, str] = {}
    lost: dict[str, str] = {}
    left_out: dict[str, str] = {}
    vanished: list[str] = []
    for part in round_.hosts:
        proof = state.proof_of_death(part)
        if state.is_past(part, round_.number):
            continue
        if proof:
            fenced[part.session] = lost[part.host] = left_out[part.host] = proof
            continue
        until = _may_live_until(state, policy, round_, part, since, timeout_s, is_saving=halt.is_saving)
        over_at = max(over_at, until)
        if until >= now:
            pending.append(part)
            if until > since + timeout_s or not state.is_registered(part):
                unheard[part.host] = until
        elif state.is_registered(part):
            fenced[part.session] = f"{part.host} did not stop its workers within {now - since:.0f} s"
            left_out[part.host] = fenced[part.session]
        else:
            why = f"{part.host} is lost; its lease is gone"
            fenced[part.session] = lost[part.host] = left_out[part.host] = why
            vanished.append(part.host)
    return Stopping(tuple(pending), unheard, fenced, lost, left_out, tuple(vanished), over_at)


def _may_live_until(
    state: ClusterState,
    policy: Policy,
    round_: Round,
    part: RoundHost,
    since: float,
    timeout_s: float,
    *,
    is_saving: bool,
) -> float:
    """Return until when a host is waited for that has not said that its workers are gone.

    One that has killed them and waits for the kernel runs none of their code any more. Any other may not know of the
    halt: then it obeys its deadlines, from the end of its lease or its last news.
    """
    if not state.is_registered(part):
        until = gone_by(state, policy, round_, part, state.gone_since(part))
        # it may know that its workers shall save, and be cut off since
        return max(until, since + timeout_s) if is_saving else until
    status = state.status_of(part, round_.number)
    if status is not None and status.phase is HostPhase.STOPPING:
        return since + timeout_s
    return max(since + timeout_s, gone_by(state, policy, round_, part, since + deaf_within_s(policy.lease_ttl_s)))


def _waiting_words(now: float, round_: Round, stopping: Stopping) -> str:
    names = ", ".join(part.host for part in stopping.pending[:8])
    text = f"round {round_.number} is halted: waiting for {names} to stop"
    if not stopping.unheard:
        return text
    left_s = max(stopping.unheard.values()) - now
    unheard = ", ".join(sorted(stopping.unheard)[:8])
    return f"{text}; {unheard} cannot be reached, and its workers end within {left_s:.0f} s"


def _done_code(state: ClusterState, round_: Round) -> int | None:
    """Return the job's exit code if all had finished their training when they were halted."""
    found = statuses_in(state, round_)
    is_done = len(found) == len(round_.hosts) and all(
        status.phase is HostPhase.DONE and status.exit_code == ExitCode.OK for status in found
    )
    return int(ExitCode.OK) if is_done else None


def _judge(
    now: float,
    state: ClusterState,
    policy: Policy,
    round_: Round,
    stopping: Stopping,
    incident: Incident,
    since: float,
) -> Decision:
    """Decide what the incident means, now that all that can be known of it is known."""
    failures = _failures_of(state, round_, incident)
    incident = _completed(now, state, round_, incident)
    if incident.kind is IncidentKind.NUMERICS and incident.action == STOP:
        return _end(now, state, incident, int(ExitCode.NON_FINITE), incident.reason, round_)
    if incident.kind in (IncidentKind.REQUEST, IncidentKind.STRAGGLER, IncidentKind.NUMERICS):
        if incident.action == STOP:
            unsaved = _unsaved(failures)
            if unsaved:
                reason = f"{incident.reason}, but not all workers saved: {unsaved[0]}"
                incident = replace(incident, reason=reason, evidence=(*incident.evidence, *unsaved)[:16])
            return _end(now, state, incident, _code_of_saving(state, round_, incident), incident.reason, round_)
        return _form(now, state, policy, round_, stopping, incident, since, (UpdateIncident(incident),))
    host_of = {rank: part.host for part in round_.hosts for rank in _ranks_of(part)}
    fit = eligible(now, state, policy, round_).available
    facts = Facts(
        kind=incident.kind,
        round=round_.number,
        failures=failures,
        host_of=host_of,
        lost={**dict.fromkeys(_lost_before(incident), "its lease is gone"), **stopping.lost},
        accused=_accused(state, round_, incident, {host_of[one.rank] for one in failures if one.rank in host_of}),
        accused_ranks=incident.culprit_ranks,
        sign=next(iter(incident.evidence), ""),
        last_step=incident.last_step,
        told=next((f"{one.host}: {one.last_error}" for one in statuses_in(state, round_) if one.last_error), ""),
        fit=frozenset(host for host, record in fit.items() if record.session not in stopping.fenced),
    )
    response = respond(facts, history_of(state, incident), policy, now)
    incident = _answered(incident, response, stopping, len(failures))
    if response.action in (STOP, REQUEUE):
        return _end(now, state, incident, response.exit_code, response.reason, round_)
    actions: tuple[Action, ...] = ()
    if response.is_cordoned:
        cordons = [Cordon(host, response.reason, "driver", now, incident.incident_id) for host in response.cordoned]
        actions += tuple(map(CordonHost, cordons))
        state = replace(state, cordons={**state.cordons, **{one.host: one for one in cordons}})
    if response.is_paired and policy.has_pair_checks:
        incident = replace(incident, notes={**incident.notes, PAIRS_NOTE: "yes"})
    if response.is_checked:
        incident = replace(incident, notes={**incident.notes, CHECK_NOTE: ",".join(response.culprit_hosts)})
        command = HostCommand(
            state.next_command, "check", response.culprit_hosts, incident.incident_id, created_unix_s=now
        )
        actions += (SendCommand(command),)
    state = replace(state, incidents={**state.incidents, incident.incident_id: incident})
    return _form(now, state, policy, round_, stopping, incident, since, (UpdateIncident(incident), *actions))


def _form(
    now: float,
    state: ClusterState,
    policy: Policy,
    round_: Round,
    stopping: Stopping,
    incident: Incident,
    since: float,
    actions: tuple[Action, ...],
) -> Decision:
    formed = form(
        now, state, policy, previous=round_, fenced=tuple(stopping.fenced), left_out=stopping.left_out,
        incident=incident, since=stopping.over_at, reason=incident.reason, vanished=stopping.vanished,
    )  # fmt: skip
    if not any(isinstance(one, WriteRound) for one in formed.actions):
        actions = (*actions, *released(now, state, policy, round_, incident, since))
    # an incident that forming brings further is written once
    later = {one.incident.incident_id for one in formed.actions if isinstance(one, UpdateIncident)}
    kept = (one for one in actions if not (isinstance(one, UpdateIncident) and one.incident.incident_id in later))
    return Decision((*kept, *formed.actions), formed.reason)


def _failures_of(state: ClusterState, round_: Round, incident: Incident) -> tuple[RankFailure, ...]:
    """Return how ranks of a round ended, the earliest first, with what came in while the round was stopping."""
    failures = {failure.rank: failure for failure in incident.failures}
    failures.update(state.failures.get(round_.number, {}))
    known = (one for one in failures.values() if 0 <= one.rank < round_.world_size)
    return tuple(sorted(known, key=lambda one: one.at_unix_s))


def _completed(now: float, state: ClusterState, round_: Round, incident: Incident) -> Incident:
    """Return the incident with what came in while the round was stopping; one that was judged before is as it was."""
    if incident.moments.halted is not None:
        return incident
    steps = [step for step in (incident.last_step, last_step(state, round_)) if step is not None]
    return replace(
        incident,
        failures=telling(_failures_of(state, round_, incident)),
        last_step=max(steps, default=None),
        moments=replace(incident.moments, halted=no_earlier(now, incident.moments)),
    )


def _lost_before(incident: Incident) -> tuple[str, ...]:
    return incident.culprit_hosts if incident.kind is IncidentKind.HOST_LOST else ()


def _accused(state: ClusterState, round_: Round, incident: Incident, victims: set[str]) -> tuple[str, ...]:
    """Return the culprit by a hang's evidence, or the peer to which victims lost the connection. `victims`: hosts by
    name."""
    if incident.kind is IncidentKind.HANG:
        return incident.culprit_hosts
    by_address = {part.address: part.host for part in round_.hosts} | {part.host: part.host for part in round_.hosts}
    named = {
        by_address[address]
        for status in statuses_in(state, round_)
        for address in status.lost_hosts
        if address in by_address
    }
    return tuple(sorted(named - victims))


def _answered(incident: Incident, response: Response, stopping: Stopping, num_failures: int) -> Incident:
    known = (sentence for sentence in incident.evidence if sentence not in response.reason)
    words = [response.reason, *known, *stopping.lost.values(), *stopping.left_out.values()]
    if num_failures > len(incident.failures):
        words.insert(1, f"{num_failures} workers ended; these {len(incident.failures)} tell most")
    kind = response.kind if incident.kind is IncidentKind.FAILURE else incident.kind
    rollback = None if response.rollback is None else Rollback(incident.incident_id, *response.rollback)
    return replace(
        incident,
        rollback=rollback,
        kind=kind,
        action=response.action,
        reason=response.reason,
        label=response.label,
        culprit_hosts=response.culprit_hosts or incident.culprit_hosts,
        culprit_ranks=response.culprit_ranks or incident.culprit_ranks,
        evidence=tuple(dict.fromkeys(words))[:16],
    )


def _unsaved(failures: Sequence[RankFailure]) -> tuple[str, ...]:
    """Return how workers ended that were asked to save and did not, the likely cause first."""
    bad = [one for one in failures if one.exit_code not in (ExitCode.OK, ExitCode.SAVED_AND_STOPPED)]
    ordered = sorted(bad, key=lambda one: (is_victim(one), one.at_unix_s, one.rank))
    return tuple(
        f"rank {one.rank} {end_text(one.exit_code)}{f': {one.line.strip()}' if one.line else ''}" for one in ordered
    )


def _code_of_saving(state: ClusterState, round_: Round, incident: Incident) -> int:
    """Return the exit code of a job that was asked to stop: the one asked for, unless workers failed meanwhile."""
    codes = [failure.exit_code for failure in state.failures.get(round_.number, {}).values()]
    bad = [code for code in codes if code not in (ExitCode.OK, ExitCode.SAVED_AND_STOPPED)]
    if not bad:
        asked = incident.notes.get(EXIT_CODE_NOTE, "")
        return int(asked) if asked.isdigit() else int(ExitCode.OK)
    return next((code for code in bad if code > 0), int(ExitCode.FAILURE))


def _end(
    now: float,
    state: ClusterState,
    incident: Incident | None,
    code: int,
    reason: str,
    round_: Round,
    *,
    is_recovered: bool = False,
) -> Decision:
    open_ = {one.incident_id: one for one in state.open_incidents()}
    if incident is not None and incident.incident_id in open_:
        open_[incident.incident_id] = incident
    closed = tuple(UpdateIncident(ended(one, is_recovered=is_recovered)) for one in open_.values())
    return Decision((*closed, EndJob(JobEnd(code, reason, now, round_.number))), reason)


def _ranks_of(part: RoundHost) -> range:
    return range(part.first_rank, part.first_rank + part.num_workers)
