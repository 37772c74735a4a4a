"""Pair tests by the driver: turn by turn around the ring, by any driver, and which host is found at fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatrain.contracts.records.host_records import CheckOutcome, CheckReport, CheckResult, HostRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.job_requests import RequestKind
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import HostCommand
from megatrain_launcher.driver.actions import SendCommand
from megatrain_launcher.driver.pair_checks import PairCheck, findings_text, follow_pairs
from megatrain_launcher.driver.policy import PAIR_START_S, Policy
from megatrain_launcher.driver.state import ClusterState, Seen
from tests.helpers.driver_story import DriverStory
from tests.helpers.simulated_etcd import KEYS as SIMULATED_KEYS

KEYS = JobKeys("pairs")
POLICY = Policy(
    min_hosts=1,
    max_hosts=8,
    num_workers=2,
    feasible_counts={count: 9 - count for count in range(1, 9)},
    has_pair_checks=True,
    pair_timeout_s=7.0,
)
LIMIT_S = POLICY.pair_timeout_s + PAIR_START_S
CAMPAIGN = "round-1"
Answer = Callable[[str, str], CheckResult]


def record(number: int, switch: str = "s1") -> HostRecord:
    return HostRecord(
        f"host-{number}", f"session-{number}", 1, "127.0.0.1", 1, 2, 2, "", "", "8 x GPU", 0.0, True,
        labels={"switch": switch},
    )  # fmt: skip


def cluster(*records: HostRecord) -> ClusterState:
    return ClusterState(KEYS, "driver", 0.0, hosts={one.host: one for one in records})


def good(_: str, partner: str) -> CheckResult:
    parts = {"compute": 0.02, "wait": 0.1, "reduce": 0.01}
    return CheckResult("pair", CheckOutcome.PASSED, "", 1.0, 10.0, "ms", partner, parts)


def without(*broken: str) -> Answer:
    """Return answers of hosts; some of them reach no other host."""

    def answer(host: str, partner: str) -> CheckResult:
        if broken and {host, partner} & set(broken):
            return CheckResult("pair", CheckOutcome.WARNING, "timed out", 1.0, None, "ms", partner, {"compute": 0.02})
        return good(host, partner)

    return answer


def ordered(state: ClusterState, check: PairCheck, now: float) -> tuple[ClusterState, HostCommand]:
    """Return the state once etcd has the turn that a check requests."""
    (action,) = check.actions
    assert isinstance(action, SendCommand)
    command = action.command
    seen = Seen(len(state.commands) + 10, len(state.commands) + 10, now, now)
    return replace(
        state,
        commands={**state.commands, command.number: command},
        seen={**state.seen, KEYS.command(command.number): seen},
    ), command


def answered(state: ClusterState, command: HostCommand, answer: Answer, *but: str) -> ClusterState:
    reports = {
        (command.request, host): CheckReport(host, state.hosts[host].session, 0.0, (answer(host, partner),))
        for host, partner in command.partners.items()
        if host not in but and host in state.hosts
    }
    return replace(state, checks={**state.checks, **reports})


def whole_campaign(state: ClusterState, answer: Answer) -> tuple[PairCheck, list[HostCommand]]:
    now, commands = 0.0, list[HostCommand]()
    while True:
        check = follow_pairs(now, state, POLICY, CAMPAIGN, state.hosts.values())
        if not check.waiting:
            return check, commands
        state, command = ordered(state, check, now)
        commands.append(command)
        waiting = follow_pairs(now, state, POLICY, CAMPAIGN, ()).waiting
        assert all(host in waiting for host in command.partners)
        state = answered(state, command, answer)
        now += 1.0


def test_every_host_meets_its_neighbors() -> None:
    for count, turns in [(0, 0), (1, 0), (2, 1), (3, 3), (4, 2)]:
        check, commands = whole_campaign(cluster(*map(record, range(count))), good)
        assert len(commands) == turns, count
        assert check.findings.culprits == {}, count
        assert findings_text(check.findings) == "", count
        met = {frozenset(pair) for command in commands for pair in command.partners.items()}
        assert len(met) == check.num_pairs == (count if count > 2 else max(0, count - 1)), count


def test_neighbors_are_those_of_one_switch() -> None:
    records = [record(0, "s2"), record(1, "s1"), record(2, "s2"), record(3, "s1")]
    _, commands = whole_campaign(cluster(*records), good)
    assert commands[0].hosts == ("host-1", "host-3", "host-0", "host-2")
    assert commands[0].partners == {"host-1": "host-3", "host-3": "host-1", "host-0": "host-2", "host-2": "host-0"}


def test_host_that_reaches_no_partner_is_at_fault() -> None:
    check, _ = whole_campaign(cluster(*map(record, range(4))), without("host-2"))
    assert list(check.findings.culprits) == ["host-2"]
    assert findings_text(check.findings).startswith("host-2 is at fault: with host-3: ")


def test_two_hosts_are_suspects_only() -> None:
    check, _ = whole_campaign(cluster(record(0), record(1)), without("host-1"))
    assert check.findings.culprits == {}
    assert findings_text(check.findings).startswith("host-0 may be at fault: with host-1: ")


def test_unresponsive_host_is_at_fault_after_a_wait() -> None:
    state, now = cluster(*map(record, range(4))), 0.0
    for _ in range(2):
        state, command = ordered(state, follow_pairs(now, state, POLICY, CAMPAIGN, state.hosts.values()), now)
        state = answered(state, command, without("host-1"), "host-1")
        assert follow_pairs(now + LIMIT_S, state, POLICY, CAMPAIGN, ()).waiting.endswith("waiting for host-1")
        now += LIMIT_S + 1.0
    check = follow_pairs(now, state, POLICY, CAMPAIGN, ())
    assert list(check.findings.culprits) == ["host-1"]
    assert "host-1 did not answer" in findings_text(check.findings)


def test_host_that_leaves_during_a_test_blames_no_partner() -> None:
    state = cluster(*map(record, range(3)))
    state, command = ordered(state, follow_pairs(0.0, state, POLICY, CAMPAIGN, state.hosts.values()), 0.0)
    state = answered(state, command, without("host-0"), "host-0")
    state = replace(state, hosts={host: one for host, one in state.hosts.items() if host != "host-0"})
    second = follow_pairs(1.0, state, POLICY, CAMPAIGN, state.hosts.values())
    state, command = ordered(state, second, 1.0)
    assert command.partners == {"host-1": "host-2", "host-2": "host-1"}
    state = answered(state, command, good)
    check = follow_pairs(3.0, state, POLICY, CAMPAIGN, ())
    assert (check.waiting, check.num_pairs, findings_text(check.findings)) == ("", 1, "")


def test_new_session_of_a_host_has_not_answered() -> None:
    state = cluster(record(0), record(1))
    state, command = ordered(state, follow_pairs(0.0, state, POLICY, CAMPAIGN, state.hosts.values()), 0.0)
    state = answered(state, command, good)
    assert not follow_pairs(0.0, state, POLICY, CAMPAIGN, ()).waiting
    state = replace(state, hosts={**state.hosts, "host-1": replace(record(1), session="another")})
    assert follow_pairs(0.0, state, POLICY, CAMPAIGN, ()).waiting.endswith("waiting for host-1")


def test_pair_test_of_an_earlier_launch_is_repeated() -> None:
    state = cluster(record(0), record(1))
    state, command = ordered(state, follow_pairs(0.0, state, POLICY, CAMPAIGN, state.hosts.values()), 0.0)
    state = answered(state, command, good)
    state = replace(state, seen={**state.seen, KEYS.record: Seen(1, 99, 0.0, 0.0)})
    check = follow_pairs(0.0, state, POLICY, CAMPAIGN, state.hosts.values())
    assert [type(action) for action in check.actions] == [SendCommand]


STORY = Policy(
    min_hosts=2, max_hosts=3, num_workers=2, feasible_counts={2: 3, 3: 2}, join_timeout_s=60.0,
    has_pair_checks=True,
)  # fmt: skip


class PairedJob(DriverStory):
    """A job whose idle hosts carry out "pairs" commands, and answer as the test defines."""

    def __init__(self, num_hosts: int, result: Answer, policy: Policy = STORY) -> None:
        super().__init__(policy, num_hosts)
        self.result = result
        for host in self.hosts.values():
            host.start(self.now)

    def commands(self) -> list[HostCommand]:
        return self.records_of(HostCommand, "commands")

    def has_seen(self, *numbers: int) -> Callable[[], bool]:
        """Return a condition: whether the driver knows exactly these rounds."""
        return lambda: sorted(self.state().rounds) == [*numbers]

    def obey(self) -> None:
        super().obey()
        for command in self.commands():
            for host, partner in command.partners.items():
                key = SIMULATED_KEYS.check(command.request, host)
                if key not in self.etcd.items and self.hosts[host].can_write:
                    assert not self.hosts[host].running, "pairs disturb no training"
                    report = CheckReport(host, self.hosts[host].session, self.now, (self.result(host, partner),))
                    self.etcd.put(key, encode(report))


def begin(num_hosts: int, result: Answer, policy: Policy = STORY) -> PairedJob:
    job = PairedJob(num_hosts, result, policy)
    job.go_on_until(job.has_seen(1), 60.0)
    return job


def test_the_first_round_waits_for_pair_tests() -> None:
    job = begin(3, good)
    assert [len(command.partners) for command in job.commands()] == [2, 2, 2]
    assert set(job.members(1)) == {"host-0", "host-1", "host-2"}


def test_new_driver_continues_the_pair_tests() -> None:
    job = PairedJob(3, good)
    job.go_on_until(lambda: len(job.commands()) == 2, 60.0)
    job.change_driver()
    job.go_on_until(job.has_seen(1), 60.0)
    assert len(job.commands()) == 3


def test_a_culprit_is_cordoned_and_left_out() -> None:
    job = begin(4, without("host-1"))
    assert set(job.members(1)) == {"host-0", "host-2", "host-3"}
    cordon = job.state().cordons["host-1"]
    assert cordon.reason.startswith("pair tests: with host-")
    assert cordon.by == "driver"


def test_unexplained_failure_is_reported_and_retried() -> None:
    job = begin(2, without("host-1"), replace(STORY, max_hosts=2, feasible_counts={2: 1}))
    assert "pair tests: host-0 may be at fault" in job.rounds()[1].reason


def test_a_failure_that_names_a_host_waits_for_nothing() -> None:
    job = begin(3, good)
    job.hosts["host-1"].fail(job.now, is_cascade=False)
    job.go_on_until(job.has_seen(1, 2), 2.0)
    assert len(job.commands()) == 3


def test_victims_without_a_culprit_are_paired() -> None:
    job = begin(4, good)
    for host in job.members(1):
        job.hosts[host].fail(job.now, is_cascade=True, exit_code=69)
    job.result = without("host-0")
    job.go_on_until(job.has_seen(1, 2), 60.0)
    assert set(job.members(2)) == {"host-1", "host-2", "host-3"}
    (incident,) = job.incidents()
    assert incident.culprit_hosts == ("host-0",)
    assert incident.reason.startswith("pair tests: host-0 is at fault")
    assert job.state().cordons["host-0"].incident == incident.incident_id


def test_no_pair_is_ordered_when_pair_tests_are_off() -> None:
    assert begin(3, good, replace(STORY, has_pair_checks=False)).commands() == []


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("", "3 pairs of idle hosts passed"),
        ("host-4", "3 pairs of idle hosts passed"),
        ("host-0", "no pair tests: fewer than two hosts are idle"),
    ],
)
def test_requested_check_pairs_the_idle_hosts(host: str, text: str) -> None:
    """host-0 trains; two of five hosts train."""
    job = begin(5, good, replace(STORY, max_hosts=2, feasible_counts={2: 1}))
    before = len(job.commands())
    request = job.ask(RequestKind.CHECK, host)

    def is_done() -> bool:
        for command in job.commands():
            for name in command.hosts if command.kind == "check" else ():
                own = SIMULATED_KEYS.check(request, name)
                if own not in job.etcd.items:
                    job.etcd.put(own, encode(CheckReport(name, job.hosts[name].session, job.now, ())))
        return SIMULATED_KEYS.answer(request) in job.etcd.items and job.answer(request).is_done

    job.go_on_until(is_done, 60.0)
    assert job.answer(request).text.endswith(f"; {text}")
    assert len(job.commands()) == before + (4 if "pairs of" in text else 1)
