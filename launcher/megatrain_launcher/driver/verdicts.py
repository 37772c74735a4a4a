"""Responses to the verdicts of the diagnosis: at most one action at a time, and one final outcome per verdict.

Pure functions: no I/O and no clock. A verdict applies to one round only. The driver acts on it only if the decision has
no other action and no incident is open, so that two responses to one failure never overlap. Only a person can approve
or dismiss a verdict.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatrain.contracts.records.host_verdict import HostVerdict, OutcomeKind, VerdictKind, VerdictOutcome
from megatrain.contracts.records.job_requests import JobRequest, RequestKind
from megatrain.formatting import names_text
from megatrain_launcher.driver.actions import DriverAction, DropKey, RecordOutcome
from megatrain_launcher.driver.outcome_rules import Judgment, number_of_round, outcome_of
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.driver.verdict_actions import actions_on, keep_as_evidence

_MAX_AT_ONCE = 40
"""The most outcomes of one decision, so that many verdicts do not fill a transaction."""
_MAX_CHARS = 500
_UNKNOWN = "\ufffd"


@dataclass(frozen=True, slots=True)
class VerdictReply:
    """The answer to a request about a verdict, with the actions. `is_done`: the answer is final."""

    actions: tuple[DriverAction, ...]
    text: str
    is_accepted: bool = True
    is_done: bool = True


def answer_verdicts(now: float, state: ClusterState, policy: Policy, *, is_quiet: bool) -> tuple[DriverAction, ...]:
    """Return new outcomes of verdicts without a final one, and the actions of the first verdict to act on.

    `is_quiet`: the current decision has no other action that changes the job. Otherwise no verdict is acted on.
    """
    actions: list[DriverAction] = [*_unreadable(now, state)]
    for verdict in _unanswered(state):
        if len(actions) >= _MAX_AT_ONCE:
            break
        judged = _judge(now, state, policy, verdict)
        if judged.kind is None or judged.kind is state_of(state, verdict.verdict_id):
            continue  # undecided, or its outcome is already recorded
        if judged.kind is not OutcomeKind.ACTED:
            recorded = _outcome(now, state, verdict, judged)
            actions.append(recorded)
            # later outcomes depend on this one: a verdict equal to an earlier one is declined
            state = replace(state, outcomes={**state.outcomes, verdict.verdict_id: recorded.outcome})
        elif is_quiet:
            return (*actions, *_act(now, state, policy, verdict, judged, None))
    return tuple(actions)


def decline_all(now: float, state: ClusterState, why: str) -> tuple[DriverAction, ...]:
    """Return DECLINED outcomes for the verdicts without a final outcome, because the job is over."""
    judged = Judgment(OutcomeKind.DECLINED, f"the job is over: {why}")
    found = [_outcome(now, state, verdict, judged) for verdict in _unanswered(state)[:_MAX_AT_ONCE]]
    return (*_unreadable(now, state), *found)[:_MAX_AT_ONCE]


def decided_by_person(now: float, state: ClusterState, policy: Policy, request: JobRequest) -> VerdictReply:
    """Return the reply to a person's approval or dismissal of a verdict."""
    verdict = state.verdicts.get(request.verdict)
    if verdict is None:
        waiting = sorted(
            outcome.verdict_id for outcome in state.outcomes.values() if outcome.kind is OutcomeKind.WAITING
        )
        known = f"; waiting for a person: {names_text(waiting)}" if waiting else "; none waits for a person"
        return VerdictReply((), f"no verdict {request.verdict!r}{known}", is_accepted=False)
    outcome = state.outcomes.get(verdict.verdict_id)
    if outcome is not None and outcome.kind is not OutcomeKind.WAITING:
        who = f" by {outcome.by}" if outcome.by else ""
        return VerdictReply(
            (),
            f"verdict {verdict.verdict_id} already has the outcome {outcome.kind}{who}: {outcome.reason}",
            is_accepted=False,
        )
    if request.kind is RequestKind.DISMISS:
        why = f": {request.reason}" if request.reason else ""
        dismissed = Judgment(OutcomeKind.DECLINED, f"dismissed by {request.by}{why}")
        return VerdictReply((_outcome(now, state, verdict, dismissed, request.by),), f"dismissed {verdict.verdict_id}")
    judged = outcome_of(now, state, policy, verdict, is_approved=True)
    if judged.kind is None:
        return VerdictReply((), f"approved, and waits: {judged.reason}", is_done=False)
    if judged.kind is not OutcomeKind.ACTED:
        declined = _outcome(now, state, verdict, judged, request.by)
        return VerdictReply(
            (declined,), f"verdict {verdict.verdict_id} is declined: {judged.reason}", is_accepted=False
        )
    actions = _act(now, state, policy, verdict, judged, request)
    return VerdictReply(actions, f"approved: {judged.reason}", is_done=False)


def state_of(state: ClusterState, verdict_id: str) -> OutcomeKind | None:
    """Return the kind of a verdict's recorded outcome; None if there is none."""
    outcome = state.outcomes.get(verdict_id)
    return None if outcome is None else outcome.kind


def _judge(now: float, state: ClusterState, policy: Policy, verdict: HostVerdict) -> Judgment:
    if state_of(state, verdict.verdict_id) is not OutcomeKind.WAITING:
        return outcome_of(now, state, policy, verdict)
    if number_of_round(state) == verdict.round:
        return Judgment(OutcomeKind.WAITING, "")
    return Judgment(OutcomeKind.DECLINED, f"round {verdict.round} is over, and it was not approved in time")


def _unanswered(state: ClusterState) -> list[HostVerdict]:
    """Return the verdicts without a final outcome, oldest first. Ordered by revision, because clocks differ."""
    open_ = (
        verdict
        for verdict in state.verdicts.values()
        if state_of(state, verdict.verdict_id) in (None, OutcomeKind.WAITING)
    )
    return sorted(
        open_, key=lambda verdict: (state.created(state.keys.verdict(verdict.verdict_id)), verdict.verdict_id)
    )


def _unreadable(now: float, state: ClusterState) -> list[DriverAction]:
    """Return outcomes that decline unreadable verdicts, and deletions of keys that have no valid verdict id."""
    prefix = state.keys.directory("verdicts")
    found = sorted(key for key in state.damaged if key.startswith(prefix) and key in state.seen and _UNKNOWN not in key)
    actions: list[DriverAction] = []
    for key in found[:_MAX_AT_ONCE]:
        name = key.removeprefix(prefix)
        if not name or "/" in name:
            actions.append(DropKey(key, state.seen[key].mod_revision))
        elif state_of(state, name) in (None, OutcomeKind.WAITING):
            why = f"it cannot be read: {state.damaged[key]}"[:_MAX_CHARS]
            actions.append(RecordOutcome(VerdictOutcome(name, OutcomeKind.DECLINED, why, state.observer, now)))
    return actions


def _act(
    now: float, state: ClusterState, policy: Policy, verdict: HostVerdict, judged: Judgment, request: JobRequest | None
) -> tuple[DriverAction, ...]:
    if verdict.kind is VerdictKind.HANG:
        incident, actions = keep_as_evidence(state, verdict)
    else:
        incident, actions = actions_on(now, state, policy, verdict, judged, request)
    return (*actions, _outcome(now, state, verdict, judged, "" if request is None else request.by, incident))


def _outcome(
    now: float, state: ClusterState, verdict: HostVerdict, judged: Judgment, by: str = "", incident: str = ""
) -> RecordOutcome:
    assert judged.kind is not None
    return RecordOutcome(
        VerdictOutcome(
            verdict_id=verdict.verdict_id,
            kind=judged.kind,
            reason=judged.reason[:_MAX_CHARS],
            driver=state.observer,
            at_unix_s=now,
            by=by,
            gain_s=judged.gain_s,
            cost_s=judged.cost_s,
            incident=incident,
        )
    )
