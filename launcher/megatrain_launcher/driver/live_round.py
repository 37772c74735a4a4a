"""The decision on a live round: nothing, hold, request evidence, end the job, or halt the round.

Pure functions: no I/O and no clock. A broken round is halted at once. The response is chosen once its workers are gone,
because all reports about it have arrived then (`after_halt`). Only the culprit of a hang is determined before the halt,
because killed processes give no evidence.

A round that can continue is kept running as long as its checkpoints cannot be stored. Ending a round normally costs
little, because its state is in storage. If storage fails, the next round depends on the snapshots in the hosts' memory;
if storage cannot be read either, the next round cannot begin, and the job ends.
"""

from __future__ import annotations

from dataclasses import replace

from megatrain.contracts.exit_codes import GOOD_ENDS, ExitCode
from megatrain.contracts.records.host_records import HostPhase, RankFailure
from megatrain.contracts.records.incident import OVER_NOTE, IncidentKind
from megatrain.contracts.records.rounds import JobEnd, Round
from megatrain.formatting import count_text, names_text
from megatrain_job.failures.culprit import is_victim
from megatrain_job.jobs.incident_phrases import rank_and_end
from megatrain_launcher.driver.absent_hosts import (
    absent_of,
    hold_of_returned,
    open_hold,
    respond_to_deaths,
    respond_to_vanished,
)
from megatrain_launcher.driver.actions import Decision, DriverAction, EndJob, UpdateIncident
from megatrain_launcher.driver.breaking import break_round, broken_incident, halt, probes_for, stalled_hosts
from megatrain_launcher.driver.eligibility import eligible
from megatrain_launcher.driver.incidents import end_all, failures_of, statuses_in
from megatrain_launcher.driver.policy import GROW_AFTER_S, Policy
from megatrain_launcher.driver.stalls import respond_to_stall
from megatrain_launcher.driver.state import ClusterState

_BROKEN_PHASES = (HostPhase.FAILED, HostPhase.STOPPED, HostPhase.PARKED)


def unsaved(state: ClusterState, round_: Round) -> str:
    """Return how many of a round's last checkpoints could not be stored, and why; empty if none has failed."""
    host_saves = [(status.host, status.saves) for status in statuses_in(state, round_) if status.saves is not None]
    host, saves = max(host_saves, key=lambda saves_of_host: saves_of_host[1].num_failed, default=("", None))
    if saves is None or not saves.num_failed:
        return ""
    missing = (
        "the last checkpoint" if saves.num_failed == 1 else f"the last {count_text(saves.num_failed, 'checkpoint')}"
    )
    return f"{missing} could not be stored ({host}): {saves.error}"


def decide_live_round(now: float, state: ClusterState, policy: Policy, round_: Round) -> Decision:
    """Return the decision on a live round."""
    if _is_left_over(state, round_):
        reason = f"round {round_.number} belongs to an earlier launch"
        return Decision((halt(now, round_, reason),), reason)
    decision = _broken(now, state, round_) or _over(now, state, round_)
    if decision is not None:
        return decision
    absent = absent_of(state, round_)
    if absent.dead:
        return respond_to_deaths(now, state, round_, absent.dead)
    if absent.gone:
        return respond_to_vanished(now, state, policy, round_, absent.gone)
    stalled = stalled_hosts(state, round_)
    if stalled:
        return respond_to_stall(now, state, policy, round_, stalled)
    return _steady(now, state, policy, round_)


def _is_left_over(state: ClusterState, round_: Round) -> bool:
    """Return whether a round is of an earlier launch, and none of its hosts is registered any more."""
    return state.is_of_older_launch(round_) and not any(state.is_registered(part) for part in round_.hosts)


def _broken(now: float, state: ClusterState, round_: Round) -> Decision | None:
    """Halt a round if one of its hosts reports that it no longer trains."""
    failures = failures_of(state, round_)
    idle = {
        status.host: status.last_error or "its workers are gone"
        for status in statuses_in(state, round_)
        if status.phase in _BROKEN_PHASES
        or (status.phase is HostPhase.DONE and (status.exit_code or 0) not in GOOD_ENDS)
    }
    if not failures and not idle:
        return None
    causes_first = sorted(failures, key=is_victim)
    evidence = tuple(_end_text(failure, round_) for failure in causes_first[:8])
    evidence = evidence or tuple(f"{host} reports: {error}" for host, error in idle.items())[:8]
    began = failures[0].at_unix_s if failures else now
    incident = broken_incident(now, state, round_, IncidentKind.FAILURE, began, evidence, failures=failures)
    decision = break_round(now, round_, incident)
    # the failure may have begun on a host that sent no report: its executor may be dead while its lease is still valid
    not_yet_idle = [part for part in round_.hosts if part.host not in idle]
    return replace(decision, actions=(*decision.actions, *probes_for(now, state, not_yet_idle)))


def _end_text(failure: RankFailure, round_: Round) -> str:
    hosts = (part.host for part in round_.hosts if 0 <= failure.rank - part.first_rank < part.num_workers)
    text = rank_and_end(failure, next(hosts, None))
    return f"{text}, a victim" if is_victim(failure) else text


def _over(now: float, state: ClusterState, round_: Round) -> Decision | None:
    """End the job when all hosts are done."""
    found = statuses_in(state, round_)
    if len(found) < len(round_.hosts) or any(status.phase is not HostPhase.DONE for status in found):
        return None
    is_saved = any(status.exit_code == ExitCode.SAVED_AND_STOPPED for status in found)
    code = ExitCode.SAVED_AND_STOPPED if is_saved else ExitCode.OK
    reason = "the workers were asked to stop, and saved" if is_saved else "training is done"
    closed = end_all(state.open_incidents(), is_recovered=True)
    end = EndJob(JobEnd(int(code), reason, now, round_.number))
    return Decision((*closed, halt(now, round_, reason), end), reason)


def _steady(now: float, state: ClusterState, policy: Policy, round_: Round) -> Decision:
    """Return the decision on a healthy round: end a hold, or halt the round if waiting hosts allow a faster layout."""
    held = open_hold(state, round_)
    over: tuple[DriverAction, ...] = hold_of_returned(now, state, round_)
    if held is not None:
        over = (UpdateIncident(replace(held, notes={**held.notes, OVER_NOTE: f"{now:.3f}"})),)
    num_running = sum(1 for status in statuses_in(state, round_) if status.phase is HostPhase.RUNNING)
    text = f"round {round_.number} trains on {count_text(len(round_.hosts), 'host')}"
    if num_running < len(round_.hosts):
        text = f"round {round_.number} begins: {num_running} of {count_text(len(round_.hosts), 'host')} in training"
    if num_running < len(round_.hosts) or len(round_.hosts) >= max(policy.feasible_counts):
        return Decision(over, text)
    names = {part.host for part in round_.hosts}
    waiting = [
        name
        for name in eligible(now, state, policy, round_).available
        if name not in names and now - state.since(state.keys.host(name), now) >= GROW_AFTER_S
    ]
    count = policy.best_count(len(round_.hosts) + len(waiting))
    if count <= len(round_.hosts):
        return Decision(over, text)
    if policy.slots(count) >= policy.slots(len(round_.hosts)):
        return Decision(over, f"{text}; with {count} hosts a step would take the same time")
    reason = f"{names_text(sorted(waiting))} can take part: {len(round_.hosts)} -> {count} hosts"
    at_risk = unsaved(state, round_)
    if at_risk:
        return Decision(over, f"{text}; {reason}, once storage accepts checkpoints again: {at_risk}")
    return Decision((*over, halt(now, round_, reason, is_saving=True)), reason)
