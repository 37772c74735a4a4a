"""The driver with hosts that obey the protocol with any delay: the invariants, and that training resumes."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatrain.contracts.records.host_records import Stall
from megatrain.contracts.records.host_verdict import HostVerdict, OutcomeKind, VerdictKind
from megatrain.contracts.records.job_requests import JobRequest, RequestKind
from megatrain.contracts.records.record import encode
from megatrain_launcher.driver.policy import Policy
from tests.helpers.driver_story import DriverStory
from tests.helpers.simulated_etcd import KEYS
from tests.helpers.simulated_host import SimulatedHost
from tests.helpers.simulated_job import quiet
from tests.helpers.written_verdicts import NUMERICS, STRAGGLER

pytestmark = pytest.mark.slow

NUM_HOSTS = 4
POLICY = quiet(
    Policy(
        min_hosts=1, max_hosts=3, num_workers=2, feasible_counts={1: 3, 3: 1}, join_timeout_s=30.0,
        shrink_after_s=20.0, save_grace_s=5.0,
    )
)  # fmt: skip
SETTLE_S = 90.0
"""Stop timeout, wait for missing hosts, a stall's wait for the lease, and some decisions."""
HOSTS = st.integers(0, NUM_HOSTS - 1)


class Interleavings(RuleBasedStateMachine):
    """Each rule is an event that can occur at any moment; hosts and driver read the log at independent speeds."""

    @initialize(up=st.sets(HOSTS), eviction=st.sampled_from(["automatic", "automatic", "approval", "dry-run"]))
    def begin(self, up: set[int], eviction: Literal["automatic", "approval", "dry-run"]) -> None:
        self.job = DriverStory(replace(POLICY, eviction=eviction), NUM_HOSTS)
        self.requests = self.verdicts = 0
        for number in up:
            self.host(number).start(self.job.now)

    def host(self, number: int) -> SimulatedHost:
        return self.job.hosts[f"host-{number}"]

    @rule(seconds=st.sampled_from([0.05, 0.3, 2.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.job.now += seconds

    @rule(host=HOSTS, count=st.sampled_from([1, 3, 1000]), is_acting=st.booleans())
    def host_hears(self, host: int, count: int, is_acting: bool) -> None:
        self.host(host).read_log(count)
        if is_acting:
            self.host(host).act(self.job.now)

    @rule(count=st.sampled_from([0, 1, 3, 1000]), is_answer_lost=st.sampled_from([False, False, False, True]))
    def driver_decides(self, count: int, is_answer_lost: bool) -> None:
        self.job.driver.read_log(count, self.job.now)
        self.job.probe(self.job.driver.decide(self.job.now, is_answer_lost=is_answer_lost))

    @rule()
    def all_go_on(self) -> None:
        for _ in range(3):
            self.job.now += 0.2
            for host in self.job.hosts.values():
                host.read_log(1000)
                host.act(self.job.now)
            self.job.driver.read_log(1000, self.job.now)
            self.job.probe(self.job.driver.decide(self.job.now))

    @precondition(lambda self: self.job.driver.late)
    @rule()
    def late_transaction(self) -> None:
        self.job.driver.apply_late()

    @rule()
    def driver_changes(self) -> None:
        self.job.change_driver()

    @precondition(lambda self: self.job.old_drivers)
    @rule(count=st.sampled_from([0, 1000]))
    def old_driver_decides(self, count: int) -> None:
        old = self.job.old_drivers[-1]
        revision = self.job.etcd.revision
        if old.state is not None:
            old.read_log(count, self.job.now)
            old.decide(self.job.now)
        if old.late:
            assert not old.apply_late()
        assert self.job.etcd.revision == revision, "a driver that was replaced wrote"

    @rule(host=HOSTS)
    def executor_starts(self, host: int) -> None:
        if not self.host(host).is_up:
            self.host(host).start(self.job.now)

    @rule(host=HOSTS)
    def executor_dies(self, host: int) -> None:
        self.host(host).kill()

    @rule(host=HOSTS)
    def host_is_cut_off(self, host: int) -> None:
        self.host(host).is_connected = False

    @rule(host=HOSTS)
    def lease_runs_out(self, host: int) -> None:
        one = self.host(host)
        if not one.is_up or not one.is_connected:
            one.lose_lease()

    @rule(host=HOSTS, is_stopped=st.booleans())
    def host_returns(self, host: int, is_stopped: bool) -> None:
        one = self.host(host)
        if is_stopped:
            one.fence(self.job.now)
        if not one.is_connected:
            one.is_connected = True
            if not one.is_registered:
                one.register(self.job.now)
            one.write_status(self.job.now)

    @rule(host=HOSTS, is_cascade=st.booleans())
    def worker_dies(self, host: int, is_cascade: bool) -> None:
        self.host(host).fail(self.job.now, is_cascade=is_cascade)

    @rule(host=HOSTS)
    def step_hangs(self, host: int) -> None:
        one = self.host(host)
        if one.running and one.can_write:
            one.stall = Stall("step", one.step, 5.0, 5.0, self.job.now, (0,))
            one.write_status(self.job.now)

    @rule(kind=st.sampled_from(list(RequestKind)), host=HOSTS)
    def person_asks(self, kind: RequestKind, host: int) -> None:
        if kind is RequestKind.STOP:
            return
        self.requests += 1
        request = JobRequest(f"q{self.requests}", kind, "me@here", host=f"host-{host}")
        self.job.etcd.put(KEYS.request(request.request_id), encode(request))

    @rule(
        verdict=st.sampled_from([STRAGGLER, STRAGGLER, NUMERICS, replace(STRAGGLER, kind=VerdictKind.HANG)]),
        hosts=st.lists(HOSTS, min_size=1, max_size=2, unique=True),
        back=st.sampled_from([0, 0, 0, 1, -1]),
        is_junk=st.sampled_from([False, False, False, True]),
    )
    def diagnosis_says(self, verdict: HostVerdict, hosts: list[int], back: int, is_junk: bool) -> None:
        self.verdicts += 1
        newest = max(self.job.rounds(), default=0)
        if is_junk:
            self.job.etcd.put(KEYS.verdict(f"v-{self.verdicts}"), b"junk")
        else:
            names = tuple(f"host-{host}" for host in hosts) if verdict.hosts else ()
            self.job.write_verdict(verdict, verdict_id=f"v-{self.verdicts}", hosts=names, round=newest - back)

    @precondition(lambda self: self.verdicts)
    @rule(kind=st.sampled_from([RequestKind.APPROVE, RequestKind.APPROVE, RequestKind.DISMISS]), back=st.integers(0, 3))
    def person_decides(self, kind: RequestKind, back: int) -> None:
        self.job.ask_about(kind, f"v-{self.verdicts - back}")

    @rule()
    def cordons_are_taken_away(self) -> None:
        self.job.check()
        self.job.etcd.delete([KEYS.cordon(f"host-{number}") for number in range(NUM_HOSTS)])
        self.job.history.cordoned.clear()
        # A decision may name a host that was cordoned before it was written: read the cordon first.
        self.job.driver.read_log(1000, self.job.now)

    @invariant()
    def all_holds(self) -> None:
        if hasattr(self, "job"):
            self.job.check()

    def teardown(self) -> None:
        if not hasattr(self, "job") or KEYS.end in self.job.etcd.items:
            return  # it waited for hosts until the timeout
        self.cordons_are_taken_away()
        self.job.etcd.delete([key for key in self.job.etcd.items if key.startswith(KEYS.directory("requests"))])
        self.job.settle(SETTLE_S)
        self.check_verdicts()

    def check_verdicts(self) -> None:
        """Each verdict gets one outcome; only a verdict that waits for a person may have no final one."""
        for _ in range(20):
            self.job.now += 5.0
            self.all_go_on()
        self.job.check()
        for number in range(1, self.verdicts + 1):
            outcome = self.job.outcomes.get(f"v-{number}")
            assert outcome is not None, f"v-{number} has no outcome"
            assert outcome.kind is not OutcomeKind.WAITING or self.job.policy.eviction == "approval"


Interleavings.TestCase.settings = settings(
    max_examples=120, derandomize=True, stateful_step_count=40, suppress_health_check=list(HealthCheck),
    # To explain a failure all lines are traced, which takes three times as long.
    phases=(Phase.generate, Phase.shrink),
)  # fmt: skip
TestInterleavings = Interleavings.TestCase
