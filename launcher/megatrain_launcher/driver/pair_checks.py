"""All-reduces of neighbouring hosts, ordered turn by turn, and what they say of hosts. Pure.

One campaign goes once around the ring of its hosts. It has no state of its own: its turns are commands in etcd, and
their answers are reports there, so any driver goes on where the one before it stopped. Hosts are neighbours as the
topology has it, those of one switch first (MegaScale sec. 4.3: all-reduce with neighbours under the same switch).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatrain.contracts.host_records import CheckReport, HostRecord
from megatrain.contracts.rounds import TURN_MARK, HostCommand
from megatrain.contracts.texts import names_text
from megatrain_launcher.driver.actions import Action, SendCommand
from megatrain_launcher.driver.policy import PAIRS_TIMEOUT_S, Policy
from megatrain_launcher.driver.ranks import topology_key
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.health.pair_test import pair_results
from megatrain_launcher.health.pairs import Pair, PairResult, PairVerdict, judge_pairs, num_turns, pairs, partners

_KIND = "pairs"


@dataclass(frozen=True, slots=True)
class PairCheck:
    """How far a campaign is: `actions` and `waiting` for its next turn, or a verdict when there is none left."""

    actions: tuple[Action, ...] = ()
    waiting: str = ""
    verdict: PairVerdict = field(default_factory=PairVerdict)
    num_pairs: int = 0


def follow_pairs(
    now: float, state: ClusterState, policy: Policy, campaign: str, hosts: Iterable[HostRecord]
) -> PairCheck:
    """Begin a campaign with these hosts, or go on with it. Fewer than two hosts have nothing to do.

    `campaign` names it in etcd, for good: what was ordered under this name by an earlier launch is not looked at.
    """
    first = _command(state, campaign, 0)
    order = first.hosts if first is not None else tuple(one.host for one in sorted(hosts, key=topology_key))
    schedule: list[Pair] = []
    results: list[PairResult] = []
    for turn in range(num_turns(len(order))):
        command = _command(state, campaign, turn)
        if command is None:
            check = _order(now, state, campaign, order, turn)
            if check is None:
                continue
            return check
        met = _pairs_of(command, order, turn)
        reports = {host: _report(state, command.request, host) for pair in met for host in pair}
        silent = [host for host, report in reports.items() if report is None and host in state.hosts]
        if silent and now - state.since(state.keys.command(command.number), now) <= PAIRS_TIMEOUT_S:
            return PairCheck(waiting=f"pair tests, turn {turn + 1}: waiting for {names_text(silent, most=4)}")
        # a host that left in the middle says nothing about its partner
        schedule += [pair for pair in met if all(reports[host] is not None or host in state.hosts for host in pair)]
        results += [one for report in reports.values() if report is not None for one in pair_results(report)]
    hardware = {host: record.hardware for host, record in state.hosts.items()}
    return PairCheck(verdict=judge_pairs(schedule, results, policy.max_slowdown, hardware), num_pairs=len(schedule))


def verdict_text(verdict: PairVerdict) -> str:
    """Return what pair tests found beside good pairs; empty where that is nothing."""
    parts = [f"{host} is at fault: {why}" for host, why in verdict.guilty.items()]
    parts += [f"{host} could not be cleared: {why}" for host, why in verdict.unproven.items()]
    parts += [f"the link between {one} and {other} is bad" for one, other in verdict.bad_links]
    return "; ".join(parts)


def _turn_id(campaign: str, turn: int) -> str:
    return f"{campaign}{TURN_MARK}{turn}"


def _command(state: ClusterState, campaign: str, turn: int) -> HostCommand | None:
    job = state.seen.get(state.keys.record)
    since = 0 if job is None else job.mod_revision
    for number, command in state.commands.items():
        if command.kind == _KIND and command.request == _turn_id(campaign, turn):
            seen = state.seen.get(state.keys.command(number))
            if seen is None or seen.create_revision > since:
                return command
    return None


def _order(now: float, state: ClusterState, campaign: str, order: Sequence[str], turn: int) -> PairCheck | None:
    """Return the order for a turn, None where no pair is left in it."""
    met = [pair for pair in pairs(order, turn) if all(host in state.hosts for host in pair)]
    if not met:
        return None
    # the first turn names all hosts, so that every turn knows the ring
    hosts = tuple(order) if turn == 0 else tuple(host for pair in met for host in pair)
    command = HostCommand(
        state.next_command, _KIND, hosts, _turn_id(campaign, turn), partners=partners(met), created_unix_s=now
    )  # fmt: skip
    return PairCheck((SendCommand(command),), f"pair tests, turn {turn + 1} of {num_turns(len(order))} begins")


def _pairs_of(command: HostCommand, order: Sequence[str], turn: int) -> list[Pair]:
    """Return the pairs of a turn that were ordered: hosts that had already left have no partner."""
    return [pair for pair in pairs(order, turn) if command.partners.get(pair[0]) == pair[1]]


def _report(state: ClusterState, check: str, host: str) -> CheckReport | None:
    """Return what a host said of its pair; a life of it that is over said nothing."""
    report, record = state.checks.get((check, host)), state.hosts.get(host)
    return report if report is not None and record is not None and report.session == record.session else None
