"""The progress of a halt: which hosts must still stop, until when to wait, and which hosts are gone.

Pure functions: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.contracts.records.host_records import HostPhase
from megatrain.contracts.records.rounds import Halt, Round, RoundHost
from megatrain.formatting import names_text
from megatrain_launcher.driver.fences import grace_s, workers_gone_at
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.liveness import orders_lost_within_s


@dataclass(frozen=True, slots=True)
class Stopping:
    """The progress of a halt. Which fields list a host depends on the state of the host:

    reported that its workers are gone        none
    waited for                                pending; unreachable too, if the halt may not have reached it
    registered, but did not stop in time      fenced, left_out
    proven dead                               fenced, left_out, lost
    no lease, and its deadlines have passed   fenced, left_out, lost, vanished

    The keys of `fenced` are sessions, those of the other mappings are hosts.
    """

    pending: tuple[RoundHost, ...]
    unreachable: Mapping[str, float]
    """Pending hosts that may be unreachable, and until when their workers may live."""
    fenced: Mapping[str, str]
    """Sessions that the driver does not wait for, and why. No later round may name them."""
    lost: Mapping[str, str]
    """Hosts that are certainly gone, with the evidence."""
    left_out: Mapping[str, str]
    """Hosts that may be absent from the next round, and why."""
    vanished: tuple[str, ...]
    """Lost hosts that are not proven dead; they count as gone because their deadlines have passed."""
    over_at: float
    """The latest time until which the driver waits for a host; the wait for hosts of the next round begins then."""


def stopping_of(now: float, state: ClusterState, policy: Policy, round_: Round, halt: Halt, since: float) -> Stopping:
    """Return the progress of a halt. `since`: when this driver saw the halt."""
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
    """Return the time until which the driver waits for a host that has not reported that its workers are gone.

    A registered host in phase STOPPING has sent its workers a kill signal, and gets only the timeout. Any other host
    may not have received the halt; its workers then end by the deadlines, counted from when the host loses its lease or
    no longer receives orders.
    """
    if not state.is_registered(part):
        until = workers_gone_at(state, policy, round_, part, state.gone_since(part))
        # the host may have asked its workers to save before it was cut off
        return max(until, since + timeout_s) if is_saving else until
    status = state.status_of(part, round_.number)
    if status is not None and status.phase is HostPhase.STOPPING:
        return since + timeout_s
    return max(
        since + timeout_s,
        workers_gone_at(state, policy, round_, part, since + orders_lost_within_s(policy.lease_ttl_s)),
    )


def waiting_text(now: float, round_: Round, stopping: Stopping) -> str:
    names = names_text([part.host for part in stopping.pending])
    text = f"round {round_.number} is halted: waiting for {names} to stop"
    if not stopping.unreachable:
        return text
    left_s = max(stopping.unreachable.values()) - now
    unreachable = names_text(sorted(stopping.unreachable))
    return f"{text}; the halt may not have reached {unreachable}: workers there end within {left_s:.0f} s"
