"""The driver's decision: takes the time, the state and the policy; returns actions and the reason.

`decide` is a pure function (no I/O and no clock) and handles every state. Three cases are not about readable rounds. An
unreadable round may be running on hosts, and its key blocks the number for the next round; the driver writes a halt for
it and uses a higher number. A candidacy without a lease would never expire; the driver removes it. If the previous
launch left no end record, the first driver of this launch opens an incident with the downtime.
"""

from __future__ import annotations

from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState, Moments
from megatrain.contracts.records.rounds import Halt
from megatrain.formatting import seconds_text
from megatrain_launcher.driver.actions import (
    Alarm,
    Decision,
    DriverAction,
    DropKey,
    EndJob,
    HaltRound,
    OpenIncident,
    SendCommand,
    SkipRound,
    UpdateIncident,
    WriteRound,
)
from megatrain_launcher.driver.after_halt import follow_halt
from megatrain_launcher.driver.breaking import halt
from megatrain_launcher.driver.fences import raise_deadlines
from megatrain_launcher.driver.forming import form
from megatrain_launcher.driver.incidents import advanced_incidents, kept_receipts, new_id
from megatrain_launcher.driver.live_round import decide_live_round
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.requests import answer_all, answer_requests
from megatrain_launcher.driver.response import RESTART
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.driver.verdicts import answer_verdicts, decline_all

_UNKNOWN = "\ufffd"
_MAX_AT_ONCE = 32
_MAX_CHARS = 300


def drop_candidacies_without_lease(state: ClusterState) -> tuple[DropKey, ...]:
    """Return actions that delete the election keys without a lease."""
    found = sorted(key for key in state.damaged if key.startswith(f"{state.keys.election}/") and key in state.seen)
    # a key with bytes that are not UTF-8 is not known exactly, so it cannot be deleted by name
    known = [key for key in found if _UNKNOWN not in key][:_MAX_AT_ONCE]
    return tuple(DropKey(key, state.seen[key].mod_revision) for key in known)


def skip_unreadable(now: float, state: ClusterState) -> Decision | None:
    """Return halts of the unreadable rounds that are newer than the newest readable one; None if there are none.

    Called only if no readable round is live.
    """
    skips: list[SkipRound] = []
    number = state.next_number
    while (key := state.keys.round(number)) in state.damaged and key in state.seen and len(skips) < _MAX_AT_ONCE:
        why = f"round {number} cannot be read, and is replaced by a new round: {state.damaged[key][:_MAX_CHARS]}"
        halt = Halt(number, why, is_saving=False, created_unix_s=now)
        skips.append(SkipRound(halt, state.seen[key].mod_revision))
        number += 1
    return Decision(tuple(skips), skips[0].halt.reason) if skips else None


def report_lost_launch(now: float, state: ClusterState) -> Decision | None:
    """Open the incident of a lost launch before the first round of the current launch.

    None if no launch was lost, if the incident exists, or if a round of this launch exists. The first round takes over
    the incident like any open one, and the first completed step closes it.
    """
    lost = None if state.job is None else state.job.lost_launch
    has_begun = state.round is not None and not state.is_of_older_launch(state.round)
    if state.job is None or lost is None or has_begun:
        return None
    if any(
        incident.kind is IncidentKind.LAUNCH_LOST and state.is_of_this_launch(incident)
        for incident in state.incidents.values()
    ):
        return None
    number = 0 if state.round is None else state.round.number
    began = min(lost.last_sign_unix_s, now)
    launched = min(max(state.job.created_unix_s, began), now)
    reason = (
        f"the previous launch, begun by {lost.first_host}, left no record of its end; the job was launched again "
        f"{seconds_text(launched - began)} after its last sign of life"
    )
    incident = Incident(
        incident_id=new_id(now, state, number),
        kind=IncidentKind.LAUNCH_LOST,
        state=IncidentState.OPEN,
        round=number,
        moments=Moments(began=began, detected=launched, decided=now, halted=now),
        reason=reason,
        action=RESTART,
        evidence=lost.evidence,
        label=lost.cause,
        last_step=lost.last_step,
        driver=state.observer,
    )
    return Decision((OpenIncident(incident),), reason)


def decide(now: float, state: ClusterState, policy: Policy) -> Decision:
    """Return the decision for the state at `now`. The same arguments always give the same decision.

    The caller must write a decision's actions as one transaction, and call again only after these are in `state`.
    """
    if state.end is not None:
        answers = (*answer_all(now, state, state.end), *decline_all(now, state, state.end.reason))
        return Decision(
            (*answers, *drop_candidacies_without_lease(state), *kept_receipts(state)),
            f"the job is over: {state.end.reason}",
        )
    decision = _of_rounds(now, state, policy)
    is_quiet = not any(
        isinstance(action, HaltRound | WriteRound | SkipRound | EndJob | OpenIncident | UpdateIncident | SendCommand)
        for action in decision.actions
    )
    end = next((action.end for action in decision.actions if isinstance(action, EndJob)), None)
    if end is None:
        asked = answer_requests(now, state, policy, is_quiet=is_quiet)
        judged = () if asked else answer_verdicts(now, state, policy, is_quiet=is_quiet)
    else:
        asked, judged = answer_all(now, state, end), decline_all(now, state, end.reason)
    halts = _halt_at_end(now, state, (*decision.actions, *asked))
    # if a verdict halts the round, the halt's reason is reported instead of the live round's
    reason = next((action.halt.reason for action in judged if isinstance(action, HaltRound)), decision.reason)
    actions: tuple[DriverAction, ...] = (*decision.actions, *asked, *judged, *halts)
    return Decision(
        (*actions, *drop_candidacies_without_lease(state), *kept_receipts(state, actions), *_alarms(state)), reason
    )


def _of_rounds(now: float, state: ClusterState, policy: Policy) -> Decision:
    lost_launch = report_lost_launch(now, state)
    if lost_launch is not None:
        return lost_launch
    round_ = state.round
    is_live = round_ is not None and round_.number not in state.halts
    unreadable = None if is_live else skip_unreadable(now, state)
    if unreadable is not None:
        return unreadable
    if round_ is None:
        return form(now, state, policy, previous=None, since=state.began, reason="the job begins")
    halted = state.halts.get(round_.number)
    if halted is not None:
        return follow_halt(now, state, policy, round_, halted)
    decision = decide_live_round(now, state, policy, round_)
    if any(isinstance(action, HaltRound) for action in decision.actions):
        return decision
    followed_up = tuple(UpdateIncident(incident) for incident in advanced_incidents(now, state, round_))
    raised = raise_deadlines(state, policy, round_)
    return Decision((*followed_up, *decision.actions, *raised), decision.reason)


def _halt_at_end(now: float, state: ClusterState, actions: tuple[object, ...]) -> tuple[HaltRound, ...]:
    """Halt the live round of a job that ends, so that the next launch finds no round that appears to run."""
    round_ = state.round
    end = next((action.end for action in actions if isinstance(action, EndJob)), None)
    if end is None or round_ is None or round_.number in state.halts:
        return ()
    if any(isinstance(action, HaltRound) for action in actions):
        return ()
    return (halt(now, round_, end.reason),)


def _alarms(state: ClusterState) -> tuple[Alarm, ...]:
    # the outcome of an unreadable verdict is final
    answered = {state.keys.verdict(verdict_id) for verdict_id in state.outcomes}
    damaged = sorted(key for key in state.damaged if key not in answered)
    if not damaged:
        return ()
    more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    return (Alarm("damaged", f"{state.damaged[damaged[0]]}{more}"),)
