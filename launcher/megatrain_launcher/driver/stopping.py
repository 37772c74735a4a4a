"""A halted round on its way to a stop: which hosts are still waited for, until when, and which are gone. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.contracts.records.host_records import HostPhase
from megatrain.contracts.records.rounds import Halt, Round, RoundHost
from megatrain_launcher.driver.fences import gone_by, grace_s
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.liveness import orders_lost_within_s


@dataclass(frozen=True, slots=True)
class Stopping:
    """The progress of a halt. The state of a host decides which fields list it:

    it reported that its workers are gone     none
    waited for                                pending; unreachable too, if the halt may not have reached it
    registered, but did not stop in time      fenced, left_out
    proven dead                               fenced, left_out, lost
    no lease, and its deadlines have passed   fenced, left_out, lost, vanished

    The keys of `fenced` are sessions, those of the other mappings are hosts.
    """

    pending: tuple[RoundHost, ...]
    unreachable: Mapping[str, float]
    """Unreachable hosts among the awaited ones, and until when their workers may live."""
    fenced: Mapping[str, str]
    """Sessions that are not waited for, and why. They are in no later round."""
    lost: Mapping[str, str]
    """Hosts that are certainly gone, with the evidence."""
    left_out: Mapping[str, str]
    """Hosts that may be missing in the next round, and why."""
    vanished: tuple[str, ...]
    """Lost hosts without a proof of death. They count as gone because their deadlines have passed."""
    over_at: float
    """When the last deadline passed; from then on the next round waits for hosts."""


def stopping_of(now: float, state: ClusterState, policy: Policy, round_: Round, halt: Halt, since: float) -> Stopping:
    """Return which hosts of a halted round are still waited for, and which are not, with the reasons."""
    timeout_s = policy.stop_timeout_s + (grace_s(state, policy, round_) if halt.is_saving else 0.0)
    pending: list[RoundHost] = []
    unreachable: dict[str, float] = {}
    over_at = since
    fenced: dict[str, str] = {}
    lost: dict[str, str] = {}
    left_out: dict[str, str] = {}
    vanished: list[str] = []
    for part in round_.hosts:
        proof = state.proof_of_death(part)
        if state.has_left_round(part, round_.number):
            continue
        if proof:
            fenced[part.session] = lost[part.host] = left_out[part.host] = proof
            continue
        until = _wait_until(state, policy, round_, part, since, timeout_s, is_saving=halt.is_saving)
        over_at = max(over_at, until)
        if until >= now:
            pending.append(part)
            if until > since + timeout_s or not state.is_registered(part):
                unreachable[part.host] = until
        elif state.is_registered(part):
            fenced[part.session] = f"{part.host} did not stop its workers within {now - since:.0f} s"
            left_out[part.host] = fenced[part.session]
        else:
            why = f"{part.host} is lost; its lease is gone"
            fenced[part.session] = lost[part.host] = left_out[part.host] = why
            vanished.append(part.host)
    return Stopping(tuple(pending), unreachable, fenced, lost, left_out, tuple(vanished), over_at)


def _wait_until(
    state: ClusterState,
    policy: Policy,
    round_: Round,
    part: RoundHost,
    since: float,
    timeout_s: float,
    *,
    is_saving: bool,
) -> float:
    """Return until when to wait for a host that has not reported that its workers are gone.

    A host that has killed its workers and only waits for the kernel to end them runs none of their code any more. Any
    other host may not have received the halt; it then obeys its deadlines, counted from the end of its lease or its
    last status.
    """
    if not state.is_registered(part):
        until = gone_by(state, policy, round_, part, state.gone_since(part))
        # it may have asked its workers to save before it was cut off
        return max(until, since + timeout_s) if is_saving else until
    status = state.status_of(part, round_.number)
    if status is not None and status.phase is HostPhase.STOPPING:
        return since + timeout_s
    return max(
        since + timeout_s, gone_by(state, policy, round_, part, since + orders_lost_within_s(policy.lease_ttl_s))
    )


def waiting_text(now: float, round_: Round, stopping: Stopping) -> str:
    names = ", ".join(part.host for part in stopping.pending[:8])
    text = f"round {round_.number} is halted: waiting for {names} to stop"
    if not stopping.unreachable:
        return text
    left_s = max(stopping.unreachable.values()) - now
    unreachable = ", ".join(sorted(stopping.unreachable)[:8])
    return f"{text}; the halt may not have reached {unreachable}: workers there end within {left_s:.0f} s"
