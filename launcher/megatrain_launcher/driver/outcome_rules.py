"""The rules that decide whether to act on a verdict, wait for approval, only record it (dry run), or decline it.

Pure functions: no I/O and no clock. The rules for a slow host, in order: the verdict is current; its confidence is
high; no equal verdict has an outcome (a decline by a rule does not count); no incident is open; storage accepts
checkpoints; the host is the cause; enough other hosts exist; the gain exceeds the cost; the limits are not reached; the
configuration allows it ([diagnostics] eviction). A verdict on numerics has the first five rules, its own limits and the
last rule. A verdict on a hang only adds evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.contracts.records.host_verdict import HostVerdict, OutcomeKind, VerdictConfidence, VerdictKind
from megatrain.contracts.records.incident import Incident, IncidentKind
from megatrain.contracts.records.rounds import MAX_SKIPPED_STEPS, Round
from megatrain.formatting import count_text, names_text, seconds_text
from megatrain_job.jobs.restart_budget import HOUR_S
from megatrain_launcher.driver.eligibility import eligible
from megatrain_launcher.driver.eviction_balance import balance_of
from megatrain_launcher.driver.evictions import EvictionReason
from megatrain_launcher.driver.incidents import last_step
from megatrain_launcher.driver.live_round import unsaved
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.response_limits import incidents_since
from megatrain_launcher.driver.responses import rollbacks_since
from megatrain_launcher.driver.state import ClusterState

_HANG_S = 60.0
"""After a verdict on a hang, the driver may detect the hang itself within this time."""
_MAX_HOSTS = 32
"""The most hosts that one verdict may evict; a verdict on more hosts is implausible."""


@dataclass(frozen=True, slots=True)
class Judgment:
    """The outcome of a verdict; `kind` None: undecided. `is_stopping`: the job stops after too many rollbacks."""

    kind: OutcomeKind | None
    reason: str
    gain_s: float = 0.0
    cost_s: float = 0.0
    hosts: tuple[str, ...] = ()
    num_after: int = 0
    """The number of hosts that the next round must have."""
    is_stopping: bool = False


def outcome_of(
    now: float, state: ClusterState, policy: Policy, verdict: HostVerdict, *, is_approved: bool = False
) -> Judgment:
    """Return the outcome of a verdict.

    `is_approved`: a person approved it, so the gain need not exceed the cost. The limits still apply, unlike for
    `host evict`.
    """
    if verdict.kind is VerdictKind.HANG:
        return _of_hang(now, state, verdict)
    problem = _why_outdated(state, verdict) or _why_uncertain(verdict) or _equal_verdict(state, verdict)
    if problem:
        return _declined(problem)
    opened = state.open_incidents()
    if opened:
        return Judgment(None, f"incident {opened[0].incident_id} is open")
    round_ = state.round
    assert round_ is not None
    at_risk = unsaved(state, round_)
    if at_risk:
        return Judgment(None, f"{at_risk}; the round is not ended until storage accepts checkpoints")
    if verdict.kind is VerdictKind.NUMERICS:
        return _of_numerics(now, state, policy, round_, verdict, is_approved=is_approved)
    return _of_straggler(now, state, policy, round_, verdict, is_approved=is_approved)


def number_of_round(state: ClusterState) -> int | None:
    """Return the number of the live round; None if no round is live."""
    round_ = state.round
    return None if round_ is None or round_.number in state.halts else round_.number


def incident_of_hang(state: ClusterState, verdict: HostVerdict) -> Incident | None:
    """Return the incident of the hang that a verdict is about; None if the driver has detected no such hang."""
    found = [
        incident
        for incident in state.incidents.values()
        if incident.kind is IncidentKind.HANG and incident.round == verdict.round
    ]
    return max(found, key=state.opened, default=None)


def _declined(reason: str) -> Judgment:
    return Judgment(OutcomeKind.DECLINED, reason)


def _allowed(policy: Policy, judged: Judgment, *, is_approved: bool) -> Judgment:
    """Return the judgment, changed to WAITING or DRY_RUN if the configuration does not let the driver act on it."""
    if policy.eviction == "automatic" or is_approved:
        return judged
    if policy.eviction == "approval":
        kind, prefix = OutcomeKind.WAITING, "waits for a person"
    else:
        kind, prefix = OutcomeKind.DRY_RUN, "diagnostics.eviction is dry-run: nothing is done"
    return Judgment(kind, f"{prefix}: {judged.reason}", judged.gain_s, judged.cost_s, judged.hosts)


def _why_outdated(state: ClusterState, verdict: HostVerdict) -> str:
    """Return why a verdict does not apply to the current state of the job; empty if it does.

    Compares revisions of etcd, because the daemon's clock may be wrong by hours.
    """
    round_ = state.round
    if round_ is None:
        return "there is no round"
    if verdict.round != round_.number:
        return f"it is about round {verdict.round}, but the newest is round {round_.number}"
    if round_.number in state.halts:
        return f"round {round_.number} is over: {state.halts[round_.number].reason}"
    own = state.seen.get(state.keys.verdict(verdict.verdict_id))
    begun = state.seen.get(state.keys.round(round_.number))
    if own is not None and begun is not None and own.create_revision < begun.create_revision:
        return f"it was written before round {round_.number} began"
    return ""


def _why_uncertain(verdict: HostVerdict) -> str:
    if verdict.confidence is not VerdictConfidence.HIGH:
        return f"its confidence is {verdict.confidence}: it is shown, but never acted upon"
    return ""


def _equal_verdict(state: ClusterState, verdict: HostVerdict) -> str:
    """Return a text about an earlier equal verdict; empty if there is none, or if a rule (not a person) declined it."""
    for outcome in state.outcomes.values():
        other = state.verdicts.get(outcome.verdict_id)
        if other is None or other.verdict_id == verdict.verdict_id or _gist(other) != _gist(verdict):
            continue
        if outcome.kind is not OutcomeKind.DECLINED or outcome.by:
            return f"verdict {other.verdict_id} has the same content, and its outcome is {outcome.kind}"
    return ""


def _gist(verdict: HostVerdict) -> tuple[VerdictKind, int, frozenset[str]]:
    return verdict.kind, verdict.round, frozenset(verdict.hosts)


def _of_straggler(
    now: float, state: ClusterState, policy: Policy, round_: Round, verdict: HostVerdict, *, is_approved: bool
) -> Judgment:
    hosts = tuple(dict.fromkeys(verdict.hosts))
    problem = _why_no_eviction(round_, verdict, hosts)
    if problem:
        return _declined(problem)
    spares = _spares(now, state, policy, round_)
    num_after = policy.best_count(min(len(round_.hosts), len(round_.hosts) - len(hosts) + len(spares)))
    if not num_after:
        least = min(policy.feasible_counts)
        return _declined(
            f"the job cannot continue without {names_text(hosts)}: {_spares_text(spares)}, and it needs "
            f"{count_text(least, 'host')}"
        )
    balance = balance_of(state, policy, round_, verdict, len(hosts), len(spares))
    if not balance.is_worth_it and not is_approved:
        return Judgment(
            OutcomeKind.DECLINED, f"the gain is less than the cost: {balance.text}", balance.gain_s, balance.cost_s
        )
    evictions = [incident for incident in state.incidents.values() if incident.kind is IncidentKind.STRAGGLER]
    evicted = sum(len(incident.culprit_hosts) for incident in incidents_since(evictions, now - HOUR_S))
    if evicted + len(hosts) > policy.evictions_per_hour:
        reason = (
            f"{count_text(evicted + len(hosts), 'host')} would be evicted as stragglers within an hour "
            f"(diagnostics.evictions_per_hour={policy.evictions_per_hour})"
        )
        return Judgment(OutcomeKind.DECLINED, reason, balance.gain_s, balance.cost_s)
    reason = EvictionReason.STRAGGLER.text(
        hosts=names_text(hosts), straggler_cause=verdict.cause, balance=balance.text, spares=_spares_text(spares)
    )
    judged = Judgment(OutcomeKind.ACTED, reason, balance.gain_s, balance.cost_s, hosts, num_after)
    return _allowed(policy, judged, is_approved=is_approved)


def _why_no_eviction(round_: Round, verdict: HostVerdict, hosts: Sequence[str]) -> str:
    """Return why a verdict can never lead to an eviction, even at no cost; empty if it can."""
    if not verdict.cause.is_of_host:
        return f"its cause is {verdict.cause}: another host in its place would not be faster"
    if not hosts:
        return "it names no host"
    if len(hosts) > _MAX_HOSTS:
        return f"it names {len(hosts)} hosts, and no more than {_MAX_HOSTS} are evicted at once"
    names = {part.host for part in round_.hosts}
    strangers = [host for host in hosts if host not in names]
    if strangers:
        return f"{names_text(strangers)} {'is' if len(strangers) == 1 else 'are'} not in round {round_.number}"
    if verdict.gain_s_per_step <= 0 or (verdict.step_s is not None and verdict.gain_s_per_step >= verdict.step_s):
        step = "a step" if verdict.step_s is None else f"a step of {seconds_text(verdict.step_s)}"
        gain = f"it would gain {verdict.gain_s_per_step:g} s of {step}"
        return f"{gain}: expected more than 0 s and less than the whole step"
    return ""


def _spares(now: float, state: ClusterState, policy: Policy, round_: Round) -> tuple[str, ...]:
    names = {part.host for part in round_.hosts}
    return tuple(host for host in eligible(now, state, policy, round_).available if host not in names)


def _spares_text(spares: Sequence[str]) -> str:
    return f"spare: {names_text(spares)}" if spares else "no spare is available"


def _of_numerics(
    now: float, state: ClusterState, policy: Policy, round_: Round, verdict: HostVerdict, *, is_approved: bool
) -> Judgment:
    to_step, first, last = verdict.rollback_to, verdict.skip_from, verdict.skip_to
    if to_step is None or first is None or last is None:
        return _declined("rollback_to, skip_from and skip_to are not all given, so there is no step to roll back to")
    done = last_step(state, round_)
    reached = max(done or 0, last + 1)
    if not (0 <= to_step <= first <= last < policy.train_steps and last - first < MAX_SKIPPED_STEPS):
        return _declined(
            f"it would roll back to step {to_step} and skip the batches of steps {first} to {last}: expected steps in "
            f"this order, before step {policy.train_steps}, and at most {MAX_SKIPPED_STEPS} skipped steps"
        )
    if policy.max_rollbacks == 0:
        return _declined("diagnostics.max_rollbacks=0: the job never rolls back by itself")
    num_back = len(rollbacks_since(state.incidents.values(), now - HOUR_S))
    what = names_text(verdict.evidence[:1]) or "abnormal loss or gradients"
    if num_back >= policy.max_rollbacks:
        reason = (
            f"{what}; the job has already rolled back {count_text(num_back, 'time')} within an hour "
            f"(diagnostics.max_rollbacks={policy.max_rollbacks})"
        )
        return _allowed(policy, Judgment(OutcomeKind.ACTED, reason, is_stopping=True), is_approved=is_approved)
    reason = (
        f"{what}; back to step {to_step} or before, from step {reached}, without the batches of steps {first}-{last}"
    )
    return _allowed(policy, Judgment(OutcomeKind.ACTED, reason), is_approved=is_approved)


def _of_hang(now: float, state: ClusterState, verdict: HostVerdict) -> Judgment:
    """Return the outcome of a verdict on a hang. The driver handles hangs itself; the verdict only adds evidence."""
    incident = incident_of_hang(state, verdict)
    if incident is not None and incident.verdict:
        return _declined(f"incident {incident.incident_id} has the evidence of verdict {incident.verdict} already")
    if incident is not None:
        return Judgment(OutcomeKind.ACTED, "its evidence is kept with the incident")
    waited_s = now - state.since(state.keys.verdict(verdict.verdict_id), now)
    if number_of_round(state) == verdict.round and waited_s < _HANG_S:
        return Judgment(None, "the driver has not seen the hang yet")
    return _declined("the driver handles hangs itself, and saw none in this round")
