"""The driver with hosts that are frozen, thawed, cut off or without orders, with steps of 0.1 to 600 s.

The invariants (`TimedJob.check`): there are never two live rounds; when a round begins, no worker of an older one runs
on a host that was not frozen; no abandoned decision is applied; the job does not end while hosts are fit. At the end
all faults are over, and the job must resume training.
"""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatrain.contracts.records.host_records import HostPhase, Stall
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import Halt, RoundDeadlines
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.stopping import stopping_of
from tests.helpers.simulated_etcd import KEYS
from tests.helpers.simulated_job import quiet
from tests.helpers.timed_job import TimedHost, TimedJob

NUM_HOSTS = 4
POLICY = quiet(Policy(min_hosts=2, max_hosts=2, num_workers=1, feasible_counts={2: 1}, save_grace_s=20.0))
HOSTS = st.integers(0, NUM_HOSTS - 1)
RATES = st.sampled_from([0.996, 1.0, 1.004])
STEPS_S = [0.1, 1.0, 5.0, 60.0, 600.0]
NUM_SCHEDULES, NUM_MANY_SCHEDULES = 8, 100


class Fencing(RuleBasedStateMachine):
    """Each rule is one fault of a job whose hosts otherwise obey the protocol."""

    @initialize(
        step_s=st.sampled_from(STEPS_S), one_host=st.booleans(), driver_rate=RATES,
        rates=st.lists(RATES, min_size=NUM_HOSTS, max_size=NUM_HOSTS),
        lags=st.lists(st.sampled_from([0.0, 0.9]), min_size=NUM_HOSTS, max_size=NUM_HOSTS),
        reaction_s=st.sampled_from([0.1, 1.4]),
    )  # fmt: skip
    def begin(
        self, step_s: float, one_host: bool, driver_rate: float, rates: list[float], lags: list[float],
        reaction_s: float,
    ) -> None:  # fmt: skip
        sizes = {"min_hosts": 1, "max_hosts": 1, "feasible_counts": {1: 1}} if one_host else {}
        self.job = TimedJob(replace(POLICY, **sizes), NUM_HOSTS, step_s)  # type: ignore[arg-type]
        self.step_s = step_s
        self.job.driver_rate = driver_rate
        for host, rate, lag in zip(self.job.timed(), rates, lags, strict=True):
            host.clock_rate, host.lag, host.reaction_s = rate, lag, reaction_s
            host.start(self.job.now)
        self.job.go_on(4 * step_s + 10.0, 40)

    def host(self, number: int) -> TimedHost:
        return self.job.timed()[number]

    def strike(self, host: TimedHost, has_contributed: bool) -> None:
        """Return whether an affected host has contributed to the step in progress."""
        if has_contributed and host.running == self.job.stepping:
            self.job.has_contributed.add(host.name)

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 11.0]), steps=st.sampled_from([0.0, 0.5, 3.0]))
    def time_passes(self, seconds: float, steps: float) -> None:
        self.job.advance(seconds + steps * self.step_s)

    @rule(ticks=st.sampled_from([1, 10, 30]), steps=st.sampled_from([0.0, 0.2, 1.0]))
    def all_go_on(self, ticks: int, steps: float) -> None:
        self.job.go_on(ticks * (0.3 + steps * self.step_s / 10), ticks)

    @rule(host=HOSTS, count=st.sampled_from([1, 3, 1000]))
    def host_hears(self, host: int, count: int) -> None:
        self.host(host).read_log(count)
        self.host(host).act(self.job.now)

    @rule(count=st.sampled_from([0, 1, 3, 1000]), is_answer_lost=st.sampled_from([False, False, True]))
    def driver_decides(self, count: int, is_answer_lost: bool) -> None:
        self.job.decide(count, is_answer_lost=is_answer_lost)

    @precondition(lambda self: self.job.driver.late)
    @rule()
    def late_answer(self) -> None:
        self.job.driver.apply_late()

    @rule()
    def driver_changes(self) -> None:
        self.job.change_driver()

    @rule(host=HOSTS, has_contributed=st.booleans())
    def host_freezes(self, host: int, has_contributed: bool) -> None:
        one = self.host(host)
        self.strike(one, has_contributed)
        one.is_frozen = one.has_slept = True

    @rule(host=HOSTS)
    def host_thaws(self, host: int) -> None:
        self.host(host).is_frozen = False

    @rule(host=HOSTS)
    def host_is_cut_off(self, host: int) -> None:
        self.host(host).is_connected = False

    @rule(host=HOSTS)
    def host_returns(self, host: int) -> None:
        self.reconnect(self.host(host))

    def reconnect(self, timed_host: TimedHost) -> None:
        timed_host.is_connected, timed_host.is_frozen = True, False
        timed_host.renew(self.job.now)
        if timed_host.is_up and not timed_host.is_registered:
            timed_host.register(self.job.now)
        timed_host.write_status(self.job.now)

    @rule(host=HOSTS, is_deaf=st.booleans())
    def host_hears_no_orders(self, host: int, is_deaf: bool) -> None:
        self.host(host).is_deaf = is_deaf

    @rule(host=HOSTS, has_contributed=st.booleans())
    def executor_dies(self, host: int, has_contributed: bool) -> None:
        self.strike(self.host(host), has_contributed)
        self.host(host).kill()

    @rule(host=HOSTS)
    def executor_starts(self, host: int) -> None:
        if not self.host(host).is_up:
            self.host(host).is_frozen = False
            self.host(host).start(self.job.now)

    @rule(host=HOSTS, has_contributed=st.booleans())
    def worker_dies(self, host: int, has_contributed: bool) -> None:
        if not self.host(host).is_frozen:
            self.strike(self.host(host), has_contributed)
            self.host(host).fail(self.job.now, is_cascade=False)

    @rule(
        host=HOSTS,
        is_cut_off=st.booleans(),
        later_s=st.sampled_from([0.0, 9.0, 11.0]),
        steps=st.sampled_from([0.0, 0.9, 4.0]),
    )
    def the_others_end_while_one_hears_nothing(
        self, host: int, is_cut_off: bool, later_s: float, steps: float
    ) -> None:  # fmt: skip
        """Its round is halted at once, and a spare exists: the driver waits only for the deadlines of this host."""
        one = self.host(host)
        one.is_connected, one.is_deaf = not is_cut_off, not is_cut_off
        self.job.advance(later_s + steps * self.step_s)
        for other in self.job.timed():
            if other is not one and not other.is_frozen:
                other.fail(self.job.now, is_cascade=False)
        self.job.go_on(6.0 + 3 * self.step_s, 12)

    @invariant()
    def all_holds(self) -> None:
        if hasattr(self, "job"):
            self.job.check()

    def teardown(self) -> None:
        if not hasattr(self, "job") or KEYS.end in self.job.etcd.items:
            return
        for host in self.job.timed():
            host.is_deaf = False
            if not host.is_up:
                host.is_frozen = False
                host.start(self.job.now)
            self.reconnect(host)
        self.job.etcd.delete([key for key in self.job.etcd.items if key.startswith(KEYS.directory("cordons"))])
        for _ in range(40):
            self.job.go_on(30.0 + 2 * self.step_s, 20)
            if self.job.is_training():
                return
        raise AssertionError(f"no training: {self.job.driver.decide(self.job.driver_now)}")


class ManySchedules(Fencing):
    """As `Fencing`: another name starts at another point of the schedules."""


Fencing.TestCase.settings = settings(
    max_examples=NUM_SCHEDULES, derandomize=True, stateful_step_count=30,
    suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
)  # fmt: skip
ManySchedules.TestCase.settings = settings(Fencing.TestCase.settings, max_examples=NUM_MANY_SCHEDULES)
TestFencing = Fencing.TestCase
TestManySchedules = pytest.mark.slow(ManySchedules.TestCase)


@pytest.mark.slow(kept=["1.0-11.0", "5.0-33.0", "0.1-9.0"])
@pytest.mark.parametrize(("step_s", "wait_s"), [(0.1, 9.0), (1.0, 11.0), (5.0, 33.0), (60.0, 355.0), (600.0, 3510.0)])
def test_spare_waits_until_the_cut_off_host_has_stopped(step_s: float, wait_s: float) -> None:
    """A worker on the other host dies when the lease has just ended: without the wait, two rounds would train."""
    job = TimedJob(POLICY, NUM_HOSTS, step_s)
    for host in job.timed():
        host.start(job.now)
    job.go_on(4 * step_s + 10.0, 40)
    other, cut_off = (job.timed()[int(part.host.removeprefix("host-"))] for part in job.rounds()[1].hosts)
    cut_off.is_connected = False
    job.advance(POLICY.lease_ttl_s + 1.0)
    assert cut_off.running == 1
    other.fail(job.now, is_cascade=False)
    began = job.now
    while len(job.rounds()) == 1:
        job.go_on(0.5, 1)
    assert cut_off.running == 0
    assert job.now - began <= wait_s


@pytest.mark.slow(kept=["cut short-False"])
@pytest.mark.parametrize("is_new_driver", [False, True])
@pytest.mark.parametrize("damage", ["cut short", "removed"])
def test_host_with_unreadable_deadlines_is_awaited(damage: str, is_new_driver: bool) -> None:
    """With steps of 60 s it obeys the deadlines that it read before; hosts that can still read get the new ones."""
    job = TimedJob(POLICY, NUM_HOSTS, 60.0)
    for host in job.timed():
        host.start(job.now)
    job.go_on(250.0, 250)
    key = KEYS.deadlines(1)
    assert key in job.etcd.items
    other, cut_off = (job.timed()[int(part.host.removeprefix("host-"))] for part in job.rounds()[1].hosts)
    cut_off.is_connected = False
    if damage == "removed":
        job.etcd.delete([key])
    else:
        job.etcd.put(key, b"{")
    if is_new_driver:
        job.change_driver()
    job.go_on(POLICY.lease_ttl_s + 1.0, 11)
    reported = decode(RoundDeadlines, job.etcd.items[key].value, key)
    assert POLICY.fence_rule.deadlines(reported.interval_s).silent_s >= 180.0
    other.fail(job.now, is_cascade=False)
    job.go_on(400.0, 800)  # this checks that no host runs an older round
    assert (cut_off.running, len(job.rounds())) == (0, 2)


def test_dead_host_counts_as_stuck_from_its_death() -> None:
    """It is proven dead long after the driver began to probe it, and while its lease is valid: it trained until
    then."""
    three = replace(POLICY, min_hosts=3, max_hosts=3, feasible_counts={3: 1})
    job = TimedJob(three, 6, 5.0)
    for host in job.timed():
        host.start(job.now)
    job.go_on(30.0, 40)
    dies, fails, cut_off = (job.timed()[int(part.host.removeprefix("host-"))] for part in job.rounds()[1].hosts)
    cut_off.is_connected = False
    job.go_on(POLICY.lease_ttl_s + 1.0, 11)
    dies.kill()
    fails.fail(job.now, is_cascade=True)
    job.go_on(50.0, 100)  # this checks that no host runs an older round
    assert (cut_off.running, len(job.rounds())) == (0, 2)


def test_stall_before_a_cut_proves_nothing_later() -> None:
    """Both train on while cut off: the driver waits for the end of their deadlines, not only for the silence limit."""
    job = TimedJob(POLICY, NUM_HOSTS, 5.0)
    for host in job.timed():
        host.start(job.now)
    job.go_on(30.0, 40)
    cut_off = [job.timed()[int(part.host.removeprefix("host-"))] for part in job.rounds()[1].hosts]
    for host in cut_off:
        host.stall = Stall("step", host.step, 50.0, 50.0, job.now, (0,))
        host.write_status(job.now)
        host.is_connected = False
    job.advance(6.0)
    assert [host.stall for host in cut_off] == [None, None]
    job.go_on(POLICY.fence_rule.deadlines(0.0).end_s + 30.0, 300)
    assert ([host.running for host in cut_off], len(job.rounds())) == ([0, 0], 2)


@pytest.mark.parametrize(("step_s", "least_s"), [(5.0, 20.0), (60.0, 180.0)])
def test_saving_host_is_awaited_for_the_measured_stop_time(step_s: float, least_s: float) -> None:
    """It needs more than runtime.save_grace_s=20 for its step of 60 s: the driver and the host use the same bound."""
    job = TimedJob(POLICY, NUM_HOSTS, step_s)
    for host in job.timed():
        host.start(job.now)
    job.go_on(4 * step_s + 10.0, 40)
    round_, halt = job.rounds()[1], Halt(1, "a stop was requested", is_saving=True, created_unix_s=0.0)
    members = [one for one in job.timed() if round_.part_of(one.name, one.session) is not None]
    for host in members:
        reported = host.deadlines.get(1, RoundDeadlines(1))
        assert POLICY.fence_rule.grace_s(reported.stop_s) == least_s
        host.phase = HostPhase.STOPPING
        host.write_status(job.now)
    since = job.driver_now
    job.driver.read_log(1000, since)
    state = job.driver.state
    assert state is not None
    bound_s = POLICY.stop_timeout_s + least_s
    assert len(stopping_of(since + bound_s - 0.1, state, POLICY, round_, halt, since).pending) == len(members) == 2
    assert stopping_of(since + bound_s + 0.1, state, POLICY, round_, halt, since).pending == ()
