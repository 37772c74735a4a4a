"""Continues after a halt: once the round's workers are gone, respond to the incident and form the next round.

Pure functions: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatrain.contracts.exit_codes import GOOD_ENDS, ExitCode, end_text
from megatrain.contracts.records.host_records import HostPhase, RankFailure
from megatrain.contracts.records.incident import Incident, IncidentKind
from megatrain.contracts.records.rounds import Cordon, Halt, HostCommand, JobEnd, Rollback, Round
from megatrain_job.failures.culprit import is_victim
from megatrain_launcher.driver.actions import (
    CordonHost,
    Decision,
    DriverAction,
    EndJob,
    SendCommand,
    UpdateIncident,
    WriteRound,
)
from megatrain_launcher.driver.breaking import most_informative, probes_for
from megatrain_launcher.driver.eligibility import eligible
from megatrain_launcher.driver.forming import form
from megatrain_launcher.driver.hangs import gpu_faults
from megatrain_launcher.driver.incidents import (
    CHECK_NOTE,
    EXIT_CODE_NOTE,
    PAIRS_NOTE,
    end_all,
    failures_of,
    history_of,
    last_step,
    not_before,
    statuses_in,
)
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.requests import asked_to_stop
from megatrain_launcher.driver.response import REQUEUE, STOP, Facts, Response
from megatrain_launcher.driver.responses import respond
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.driver.stopping import Stopping, stopping_of, waiting_text
from megatrain_launcher.driver.verdict_actions import cordon_removals


def follow_halt(now: float, state: ClusterState, policy: Policy, round_: Round, halt: Halt) -> Decision:
    """Return the decision while the newest round is halted."""
    is_old = state.is_of_older_launch(round_)  # then its incident does not apply to the current launch
    incident = None if is_old else state.incidents.get(halt.incident)
    since = state.since(state.keys.halt(round_.number), now)
    stopping = stopping_of(now, state, policy, round_, halt, since)
    if stopping.pending:
        return Decision(probes_for(now, state, stopping.pending), waiting_text(now, round_, stopping))
    done = None if is_old else _done_code(state, round_)
    if done is not None:
        return _end(now, state, incident, done, "training is done", round_, is_recovered=True)
    is_stopping_job = incident is not None and incident.kind is IncidentKind.REQUEST and incident.action == STOP
    asked = None if is_stopping_job else asked_to_stop(state)
    if asked is not None:
        known = _completed(now, state, round_, incident) if incident is not None else None
        return _end(now, state, known, asked.exit_code, f"{asked.by} requested {asked.kind}", round_)
    if incident is None:
        return form(
            now, state, policy, previous=round_, fenced=tuple(stopping.fenced), left_out=stopping.left_out,
            since=stopping.over_at, reason="the job begins" if is_old else halt.reason, vanished=stopping.vanished,
        )  # fmt: skip
    if incident.moments.halted is not None:
        return _form(now, state, policy, round_, stopping, incident, since, ())
    return _respond(now, state, policy, round_, stopping, incident, since)


def _done_code(state: ClusterState, round_: Round) -> int | None:
    """Return the job's exit code if all hosts have finished their training; None otherwise."""
    found = statuses_in(state, round_)
    is_done = len(found) == len(round_.hosts) and all(
        status.phase is HostPhase.DONE and status.exit_code == ExitCode.OK for status in found
    )
    return int(ExitCode.OK) if is_done else None


def _respond(
    now: float,
    state: ClusterState,
    policy: Policy,
    round_: Round,
    stopping: Stopping,
    incident: Incident,
    since: float,
) -> Decision:
    """Return the decision with the response to the incident. Called after all reports about it have arrived."""
    failures = failures_of(state, round_, incident.failures)
    incident = _completed(now, state, round_, incident)
    if incident.kind is IncidentKind.NUMERICS and incident.action == STOP:
        return _end(now, state, incident, int(ExitCode.NON_FINITE), incident.reason, round_)
    if incident.kind in (IncidentKind.REQUEST, IncidentKind.STRAGGLER, IncidentKind.NUMERICS):
        if incident.action == STOP:
            unsaved = [failure for failure in failures if failure.exit_code not in GOOD_ENDS]
            if unsaved:
                sentences = _sentences_on(unsaved)
                reason = f"{incident.reason}, but not all workers saved: {sentences[0]}"
                incident = replace(incident, reason=reason, evidence=(*incident.evidence, *sentences)[:16])
            return _end(now, state, incident, _code_of_saving(incident, unsaved), incident.reason, round_)
        return _form(now, state, policy, round_, stopping, incident, since, (UpdateIncident(incident),))
    host_of = {rank: part.host for part in round_.hosts for rank in part.ranks}
    fit = eligible(now, state, policy, round_).available
    facts = Facts(
        kind=incident.kind,
        round=round_.number,
        failures=failures,
        host_of=host_of,
        lost={**dict.fromkeys(_lost_before(incident), "its lease is gone"), **stopping.lost},
        suspects=_suspects(
            state, round_, incident, {host_of[failure.rank] for failure in failures if failure.rank in host_of}
        ),
        suspect_ranks=incident.culprit_ranks,
        sign=next(iter(incident.evidence), ""),
        last_step=incident.last_step,
        stop_reason=next(
            (f"{status.host}: {status.last_error}" for status in statuses_in(state, round_) if status.last_error), ""
        ),
        fit=frozenset(host for host, record in fit.items() if record.session not in stopping.fenced),
        gpu_faults=gpu_faults(state.evidence_of(round_)) if incident.kind is IncidentKind.HANG else {},
    )
    response = respond(facts, history_of(state, incident), policy, now)
    incident = _answered(incident, response, stopping, len(failures))
    if response.action in (STOP, REQUEUE):
        return _end(now, state, incident, response.exit_code, response.reason, round_)
    actions: tuple[DriverAction, ...] = ()
    if response.cordoned:
        cordons = [Cordon(host, response.reason, "driver", now, incident.incident_id) for host in response.cordoned]
        actions += tuple(map(CordonHost, cordons))
        state = replace(state, cordons={**state.cordons, **{cordon.host: cordon for cordon in cordons}})
    if response.needs_pair_tests and policy.has_pair_checks:
        incident = replace(incident, notes={**incident.notes, PAIRS_NOTE: "yes"})
    if response.checked:
        incident = replace(incident, notes={**incident.notes, CHECK_NOTE: ",".join(response.checked)})
        command = HostCommand(state.next_command, "check", response.checked, incident.incident_id)
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
    actions: tuple[DriverAction, ...],
) -> Decision:
    formed = form(
        now, state, policy, previous=round_, fenced=tuple(stopping.fenced), left_out=stopping.left_out,
        incident=incident, since=stopping.over_at, reason=incident.reason, vanished=stopping.vanished,
    )  # fmt: skip
    if not any(isinstance(action, WriteRound) for action in formed.actions):
        actions = (*actions, *cordon_removals(now, state, policy, round_, incident, since))
    # if forming also updates the incident, only that update is written
    later = {action.incident.incident_id for action in formed.actions if isinstance(action, UpdateIncident)}
    kept = (
        action
        for action in actions
        if not (isinstance(action, UpdateIncident) and action.incident.incident_id in later)
    )
    return Decision((*kept, *formed.actions), formed.reason)


def _completed(now: float, state: ClusterState, round_: Round, incident: Incident) -> Incident:
    """Return the incident with the reports that arrived while the round was stopping.

    An incident whose response is already chosen is returned unchanged.
    """
    if incident.moments.halted is not None:
        return incident
    steps = [step for step in (incident.last_step, last_step(state, round_)) if step is not None]
    return replace(
        incident,
        failures=most_informative(failures_of(state, round_, incident.failures)),
        last_step=max(steps, default=None),
        moments=replace(incident.moments, halted=not_before(now, incident.moments)),
    )


def _lost_before(incident: Incident) -> tuple[str, ...]:
    return incident.culprit_hosts if incident.kind is IncidentKind.HOST_LOST else ()


def _suspects(state: ClusterState, round_: Round, incident: Incident, victims: set[str]) -> tuple[str, ...]:
    """Return the hosts to which a hang's evidence points, or the peers to which victims lost the connection.

    `victims`: names of the hosts with failed ranks; they are left out.
    """
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
    sentences = [response.reason, *known, *stopping.lost.values(), *stopping.left_out.values()]
    if num_failures > len(incident.failures):
        sentences.insert(1, f"{num_failures} workers failed; the {len(incident.failures)} most informative are kept")
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
        evidence=tuple(dict.fromkeys(sentences))[:16],
    )


def _sentences_on(unsaved: Sequence[RankFailure]) -> tuple[str, ...]:
    """Return sentences on the workers that were asked to save and failed instead, the likely cause first."""
    ordered = sorted(unsaved, key=lambda failure: (is_victim(failure), failure.at_unix_s, failure.rank))
    return tuple(
        f"rank {failure.rank} {end_text(failure.exit_code)}{f': {failure.line.strip()}' if failure.line else ''}"
        for failure in ordered
    )


def _code_of_saving(incident: Incident, unsaved: Sequence[RankFailure]) -> int:
    """Return the exit code of a job that was asked to stop: the requested code, or that of a failed worker."""
    if not unsaved:
        asked = incident.notes.get(EXIT_CODE_NOTE, "")
        return int(asked) if asked.isdigit() else int(ExitCode.OK)
    return next((failure.exit_code for failure in unsaved if failure.exit_code > 0), int(ExitCode.FAILURE))


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
    open_ = {incident.incident_id: incident for incident in state.open_incidents()}
    if incident is not None and incident.incident_id in open_:
        open_[incident.incident_id] = incident
    closed = end_all(open_.values(), is_recovered=is_recovered)
    return Decision((*closed, EndJob(JobEnd(code, reason, now, round_.number))), reason)
