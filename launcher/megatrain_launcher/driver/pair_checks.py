"""Pair tests: commands for timed all-reduces between neighboring hosts, turn by turn, and the findings.

Pure functions: no I/O and no clock. A pair test run goes once around a ring of hosts. Its state is in etcd only: turns
are commands and results are reports, so a new driver can continue the run. Hosts of one switch are neighbors in the
ring (MegaScale sec. 4.3: all-reduce with neighbors under the same switch).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatrain.contracts.records.host_records import CheckReport, HostRecord
from megatrain.contracts.records.rounds import TURN_MARK, HostCommand
from megatrain.formatting import names_text
from megatrain_launcher.driver.actions import DriverAction, SendCommand
from megatrain_launcher.driver.policy import PAIR_START_S, Policy
from megatrain_launcher.driver.ranks import topology_key
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.health.pair_test import pair_results
from megatrain_launcher.health.pairs import Pair, PairFindings, PairResult, judge_pairs, num_turns, pairs, partners

_KIND = "pairs"


@dataclass(frozen=True, slots=True)
class PairCheck:
    """The progress of a pair test run: `actions` and `waiting` of the current turn, or the findings after the last."""

    actions: tuple[DriverAction, ...] = ()
    waiting: str = ""
    findings: PairFindings = field(default_factory=PairFindings)
    num_pairs: int = 0


def follow_pairs(
    now: float, state: ClusterState, policy: Policy, test_run: str, hosts: Iterable[HostRecord]
) -> PairCheck:
    """Begin or continue a pair test run with these hosts. With fewer than two hosts, return an empty result.

    `test_run`: the id of the run in etcd. Commands of the same id from an earlier launch are ignored.
    """
    first = _command(state, test_run, 0)
    ring = first.hosts if first is not None else tuple(host.host for host in sorted(hosts, key=topology_key))
    schedule: list[Pair] = []
    results: list[PairResult] = []
    for turn in range(num_turns(len(ring))):
        command = _command(state, test_run, turn)
        if command is None:
            check = _command_turn(now, state, test_run, ring, turn)
            if check is None:
                continue
            return check
        met = _pairs_of(command, ring, turn)
        reports = {host: _report(state, command.request, host) for pair in met for host in pair}
        silent = [host for host, report in reports.items() if report is None and host in state.hosts]
        waited_s = now - state.since(state.keys.command(command.number), now)
        if silent and waited_s <= policy.pair_timeout_s + PAIR_START_S:
            return PairCheck(waiting=f"pair tests, turn {turn + 1}: waiting for {names_text(silent, most=4)}")
        # a pair with a host that left before its report is not judged
        schedule += [pair for pair in met if all(reports[host] is not None or host in state.hosts for host in pair)]
        results += [result for report in reports.values() if report is not None for result in pair_results(report)]
    hardware = {host: record.hardware for host, record in state.hosts.items()}
    return PairCheck(findings=judge_pairs(schedule, results, policy.max_slowdown, hardware), num_pairs=len(schedule))


def findings_text(findings: PairFindings) -> str:
    """Return a text about hosts and links that are at fault; empty if there are none."""
    parts = [f"{host} is at fault: {why}" for host, why in findings.culprits.items()]
    parts += [f"{host} may be at fault: {why}" for host, why in findings.suspects.items()]
    parts += [f"the link between {host} and {other} is bad" for host, other in findings.bad_links]
    return "; ".join(parts)


def _turn_id(test_run: str, turn: int) -> str:
    return f"{test_run}{TURN_MARK}{turn}"


def _command(state: ClusterState, test_run: str, turn: int) -> HostCommand | None:
    job = state.seen.get(state.keys.record)
    since = 0 if job is None else job.mod_revision
    for number, command in state.commands.items():
        if command.kind == _KIND and command.request == _turn_id(test_run, turn):
            seen = state.seen.get(state.keys.command(number))
            if seen is None or seen.create_revision > since:
                return command
    return None


def _command_turn(now: float, state: ClusterState, test_run: str, ring: Sequence[str], turn: int) -> PairCheck | None:
    """Return the command for a turn; None if no pair of registered hosts is left in it."""
    met = [pair for pair in pairs(ring, turn) if all(host in state.hosts for host in pair)]
    if not met:
        return None
    # the command of the first turn names all hosts; later turns read the ring from it
    hosts = tuple(ring) if turn == 0 else tuple(host for pair in met for host in pair)
    command = HostCommand(state.next_command, _KIND, hosts, _turn_id(test_run, turn), partners=partners(met))
    return PairCheck((SendCommand(command),), f"pair tests, turn {turn + 1} of {num_turns(len(ring))} begins")


def _pairs_of(command: HostCommand, ring: Sequence[str], turn: int) -> list[Pair]:
    """Return the pairs of a turn that the command contains. Pairs of hosts that had already left are missing there."""
    return [pair for pair in pairs(ring, turn) if command.partners.get(pair[0]) == pair[1]]


def _report(state: ClusterState, check: str, host: str) -> CheckReport | None:
    """Return a host's report on its pair; a report from an earlier session does not count."""
    report, record = state.checks.get((check, host)), state.hosts.get(host)
    return report if report is not None and record is not None and report.session == record.session else None
