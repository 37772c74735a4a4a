"""Sequences of events in a simulated job for tests of the driver: hosts obey, the driver sees everything at once, time
passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatrain.contracts.records.host_records import HostPhase, Stall
from megatrain.contracts.records.host_verdict import HostVerdict, OutcomeKind, VerdictOutcome
from megatrain.contracts.records.incident import Incident
from megatrain.contracts.records.job_requests import Answer, JobRequest, RequestKind
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import Halt, JobEnd
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.state import ClusterState
from tests.helpers.raw_python import raw_python
from tests.helpers.simulated_etcd import KEYS
from tests.helpers.simulated_job import SimulatedJob
from tests.helpers.written_verdicts import STRAGGLER

POLICY = Policy(min_hosts=2, max_hosts=2, num_workers=2, feasible_counts={2: 1}, join_timeout_s=60.0)
ELASTIC = replace(POLICY, min_hosts=1, feasible_counts={1: 2, 2: 1}, shrink_after_s=30.0)
APPROVAL = replace(POLICY, eviction="approval")
DRY_RUN = replace(POLICY, eviction="dry-run")


class DriverStory(SimulatedJob):
    """A simulated job in which a test causes the events."""

    def go_on(self, seconds: float, *, step_s: float = 0.1) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += step_s
            self.obey()
            self.drive()

    def obey(self) -> None:
        """Let only the hosts receive events and act."""
        for host in self.hosts.values():
            host.read_log(1000)
            host.act(self.now)

    def drive(self) -> None:
        """Let only the driver receive events and decide."""
        self.driver.read_log(1000, self.now)
        self.probe(self.driver.decide(self.now))
        self.check()

    def go_on_until(self, is_met: Callable[[], bool], limit_s: float, *, step_s: float = 0.1) -> float:
        begin_s = self.now
        while not is_met():
            assert self.now < begin_s + limit_s, self.driver.decide(self.now)
            self.go_on(step_s, step_s=step_s)
        return self.now - begin_s

    def goes_on(self, number: int) -> Callable[[], bool]:
        """Return a condition: whether round `number` trains."""
        return lambda: number in self.rounds() and self.is_training()

    def records_of(self, kind: type, directory: str) -> list:
        prefix = KEYS.directory(directory)
        items = self.etcd.items
        return [decode(kind, items[key].value, key) for key in sorted(items) if key.startswith(prefix)]

    def incidents(self) -> list[Incident]:
        return self.records_of(Incident, "incidents")

    def members(self, number: int) -> list[str]:
        return [part.host for part in self.rounds()[number].hosts]

    def is_over(self) -> bool:
        return KEYS.end in self.etcd.items

    def end(self) -> JobEnd:
        return decode(JobEnd, self.etcd.items[KEYS.end].value, "end")

    def halted(self, number: int) -> Halt:
        return decode(Halt, self.etcd.items[KEYS.halt(number)].value, "halt")

    def ask(self, kind: RequestKind, host: str = "", **changes: str) -> str:
        """Request something of the job; return the request's id."""
        request_id = f"q{len(self.etcd.log)}"
        self.etcd.put(KEYS.request(request_id), encode(JobRequest(request_id, kind, "me@here", host, **changes)))
        return request_id

    def ask_about(self, kind: RequestKind, verdict_id: str) -> str:
        """Request to approve or to dismiss a verdict; return the request's id."""
        return self.ask(kind, verdict=verdict_id)

    def answer(self, request_id: str) -> Answer:
        return decode(Answer, self.etcd.items[KEYS.answer(request_id)].value, "answer")

    def say_done(self, *names: str) -> None:
        for name in names:
            host = self.hosts[name]
            host.running, host.phase = 0, HostPhase.DONE
            host.write_status(self.now)

    def lose(self, *names: str) -> None:
        """End hosts, and their leases."""
        for name in names:
            self.hosts[name].kill()
            self.hosts[name].lose_lease()

    def cut_off(self, *names: str) -> None:
        """End the leases of hosts that still run."""
        for name in names:
            self.hosts[name].is_connected = False
            self.hosts[name].lose_lease()

    def reconnect(self, name: str) -> None:
        self.hosts[name].is_connected = True
        self.hosts[name].register(self.now)

    def state(self) -> ClusterState:
        assert self.driver.state is not None
        return self.driver.state

    def reason(self) -> str:
        """Return why the driver decides as it does now."""
        decision = self.driver.decide(self.now)
        assert decision is not None
        return decision.reason

    def stall(self, *names: str) -> None:
        for name in names:
            host = self.hosts[name]
            host.stall = Stall("step", host.step, 5.0, 5.0, self.now, (0,))
            host.write_status(self.now)

    def write_verdict(self, verdict: HostVerdict = STRAGGLER, **changes: Any) -> str:
        """Write a current verdict with a new id, as a daemon would; return the id."""
        verdict_id = changes.pop("verdict_id", f"v-{len(self.etcd.log)}")
        written = replace(verdict, verdict_id=verdict_id, **{"created_unix_s": self.now, **changes})
        self.etcd.put(KEYS.verdict(verdict_id), encode(written))
        return verdict_id

    def has_outcome(self, verdict_id: str) -> bool:
        return KEYS.outcome(verdict_id) in self.etcd.items

    def outcome(self, verdict_id: str) -> VerdictOutcome:
        """Return the outcome of a verdict so far."""
        return decode(VerdictOutcome, self.etcd.items[KEYS.outcome(verdict_id)].value, "outcome")

    def declined(self, verdict: HostVerdict = STRAGGLER, **changes: Any) -> str:
        """Return why a verdict is declined at once."""
        verdict_id = self.write_verdict(verdict, **changes)
        self.drive()
        outcome = self.outcome(verdict_id)
        assert outcome.kind is OutcomeKind.DECLINED
        assert outcome.incident == outcome.by == ""
        assert raw_python(outcome.reason) == []
        return outcome.reason


def begin(policy: Policy = POLICY, num_hosts: int = 3, up: int | None = None) -> DriverStory:
    """Return a job that trains, unless there are too few hosts."""
    job = DriverStory(policy, num_hosts)
    for host in list(job.hosts.values())[: num_hosts if up is None else up]:
        host.start(job.now)
    job.go_on(3.0)
    return job
