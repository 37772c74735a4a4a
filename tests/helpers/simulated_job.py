"""A job without processes: an etcd of dicts, hosts that obey the driver's protocol, and drivers that really decide.

Every part sees etcd through its own position in the log of changes, so that a test chooses all delays. `check` tests
the invariants after each change.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.host_records import HostPhase
from megatrain.contracts.records.host_verdict import HostVerdict, OutcomeKind, VerdictOutcome
from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import Round
from megatrain_job.coordination.watch_event import ChangeKind
from megatrain_job.coordination.wire import Compare, KeyValue, Operation, Put
from megatrain_launcher.driver.actions import Decision, Probe
from megatrain_launcher.driver.decide import decide
from megatrain_launcher.driver.folding import fold
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.probe import ProbeResult
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.driver.writes import writes_of
from megatrain_launcher.liveness import Liveness
from tests.helpers.job_history import JobHistory
from tests.helpers.simulated_etcd import KEYS, SimulatedEtcd
from tests.helpers.simulated_host import SimulatedHost


@dataclass
class SimulatedDriver:
    """An elected candidate: it folds, decides, and writes with the guards of the real driver."""

    name: str
    etcd: SimulatedEtcd
    policy: Policy
    token: int = 0
    leadership_revision: int = 0
    awaited: int = 0
    place: int = 0
    state: ClusterState | None = None
    late: list[tuple[tuple[Compare, ...], tuple[Operation, ...]]] = field(default_factory=list)
    """Transactions without an answer, which etcd may still apply."""

    @property
    def key(self) -> str:
        return f"{KEYS.election}/{self.name}"

    def take_over(self, now: float) -> None:
        """Win the election: the previous leader loses its key."""
        self.etcd.delete([key for key in self.etcd.items if key.startswith(f"{KEYS.election}/")])
        assert self.etcd.txn((), (Put(self.key, b"", lease_id=1),))
        self.token = self.etcd.items[self.key].create_revision
        self.reread(now)

    def reread(self, now: float) -> None:
        """Renew the leadership revision, and only then read: after that no abandoned transaction can be applied."""
        if not self.etcd.txn(
            (Compare.create_revision(self.key, self.token),), (Put(self.key, b"", is_lease_kept=True),)
        ):
            return
        self.leadership_revision = self.awaited = self.etcd.revision
        self.place = len(self.etcd.log)
        self.state = fold(ClusterState(KEYS, self.name, now), (self.etcd.snapshot(),), now)

    def read_log(self, count: int, now: float) -> None:
        if self.state is None:
            return
        self.state = fold(self.state, self.etcd.log[self.place : self.place + count], now)
        self.place = min(self.place + count, len(self.etcd.log))

    def decide(self, now: float, *, is_answer_lost: bool = False) -> Decision | None:
        """Decide and write, if everything earlier was seen; a lost answer leaves the transaction in flight.

        After that nothing is decided until the leadership revision is renewed, at the next call.
        """
        if self.state is None:
            self.reread(now)
        if self.state is None or self.state.revision < self.awaited:
            return None
        decision = decide(now, self.state, self.policy)
        writes = writes_of(decision.actions, KEYS, damaged=self.state.damaged_revisions)
        if not writes.operations:
            return decision
        guards = (
            Compare.create_revision(self.key, self.token),
            Compare.mod_revision(self.key, self.leadership_revision),
            *writes.conditions,
        )
        operations = (*writes.operations, Put(self.key, b"", is_lease_kept=True))
        if is_answer_lost:
            self.late.append((guards, operations))
            self.state = None
        elif self.etcd.txn(guards, operations):
            self.leadership_revision = self.awaited = self.etcd.revision
        else:
            self.reread(now)
        return decision

    def apply_late(self) -> bool:
        """Let etcd apply a transaction whose answer was lost long ago; return whether its conditions still held."""
        guards, operations = self.late.pop(0)
        is_given_up = self.state is not None
        is_applied = self.etcd.txn(guards, operations)
        assert not (is_applied and is_given_up), "an abandoned decision was applied"
        return is_applied


class SimulatedJob:
    """All hosts, one driver after another, and the invariants."""

    def __init__(self, policy: Policy, num_hosts: int) -> None:
        self.now = 1000.0
        self.policy = policy
        self.etcd = SimulatedEtcd()
        self.hosts = {
            name: SimulatedHost(name, self.etcd, policy.num_workers, f"s{number % 2}")
            for number in range(num_hosts)
            for name in [f"host-{number}"]
        }
        self.num_drivers = 0
        self.driver = self.new_driver()
        self.old_drivers: list[SimulatedDriver] = []
        self.checked = 0
        self.history = JobHistory(KEYS)
        self.outcomes: dict[str, VerdictOutcome] = {}
        self.evictions: dict[str, tuple[float, int]] = {}
        """Evictions for slowness, by incident: the time, and the number of hosts."""

    def new_driver(self) -> SimulatedDriver:
        self.num_drivers += 1
        driver = SimulatedDriver(f"driver-{self.num_drivers}", self.etcd, self.policy)
        driver.take_over(self.now)
        return driver

    def change_driver(self) -> None:
        self.old_drivers.append(self.driver)
        self.driver = self.new_driver()

    def probe(self, decision: Decision | None) -> None:
        """Answer the probes of a decision at once."""
        results = []
        for action in decision.actions if decision is not None else ():
            if isinstance(action, Probe):
                host = self.hosts[action.host]
                if not host.is_connected:
                    vitality = Liveness.UNKNOWN
                elif host.is_up and host.session == action.session:
                    vitality = Liveness.ALIVE
                else:
                    vitality = Liveness.DEAD
                results.append(ProbeResult(action.host, action.session, vitality, "probed", self.now))
        if results and self.driver.state is not None:
            self.driver.state = self.driver.state.with_probes(tuple(results))

    def settle(self, limit_s: float) -> float:
        """End all faults and let time pass until all hosts of a live round train; return the duration."""
        begin = self.now
        for host in self.hosts.values():
            host.stall, host.is_connected = None, True
            if not host.is_up:
                host.start(self.now)
            if not host.is_registered:
                host.register(self.now)
            host.write_status(self.now)
        while self.now < begin + limit_s:
            self.now += 0.2
            for host in self.hosts.values():
                host.read_log(len(self.etcd.log))
                host.act(self.now)
            self.driver.read_log(len(self.etcd.log), self.now)
            self.probe(self.driver.decide(self.now))
            self.check()
            if self.is_training():
                return self.now - begin
        raise AssertionError(f"no training after {limit_s} s: {self.driver.decide(self.now)}")

    def is_training(self) -> bool:
        live = self.live_rounds()
        return bool(live) and all(
            self.hosts[part.host].running == live[0].number and self.hosts[part.host].phase is HostPhase.RUNNING
            for part in live[0].hosts
        )

    def rounds(self) -> dict[int, Round]:
        prefix = KEYS.directory("rounds")
        found: dict[int, Round] = {}
        for key, item in self.etcd.items.items():
            with suppress(CoordinationError):
                if key.startswith(prefix):
                    found[int(key.removeprefix(prefix))] = _round_of(item.value, key)
        return found

    def live_rounds(self) -> list[Round]:
        return [one for number, one in self.rounds().items() if KEYS.halt(number) not in self.etcd.items]

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        for changes in self.etcd.log[self.checked :]:
            self.history.take(changes)
            for change in changes.changes:
                if change.kind is ChangeKind.PUT:
                    with suppress(CoordinationError):
                        self._check_write(change.item)
        self.checked = len(self.etcd.log)
        rounds = self.rounds()
        assert len([number for number in rounds if KEYS.halt(number) not in self.etcd.items]) <= 1, "two live rounds"
        newest = max(rounds, default=0)
        for host in self.hosts.values():
            if host.running and host.running < newest:
                assert host.session in self.history.fenced, (
                    f"{host.name} runs round {host.running}, and {newest} has begun"
                )

    def _check_write(self, item: KeyValue) -> None:
        key = item.key.decode()
        match KEYS.parts(key):
            case ("outcomes", verdict_id):
                self._check_outcome(verdict_id, decode(VerdictOutcome, item.value, key))
            case ("incidents", _):
                self._check_incident(decode(Incident, item.value, key))
            case ("rounds", _):
                round_ = decode(Round, item.value, key)
                assert len(round_.hosts) in self.policy.feasible_counts, "a world size that is not possible"

    def _check_outcome(self, verdict_id: str, outcome: VerdictOutcome) -> None:
        before = self.outcomes.get(verdict_id)
        assert before is None or before.kind is OutcomeKind.WAITING, "two final outcomes of a verdict"
        assert before is None or outcome.kind is not OutcomeKind.WAITING, "it waits for the second time"
        self.outcomes[verdict_id] = outcome
        if outcome.kind is OutcomeKind.ACTED:
            incident = decode(Incident, self.etcd.items[KEYS.incident(outcome.incident)].value, "incident")
            assert incident.verdict == verdict_id
            item = self.etcd.items.get(KEYS.verdict(verdict_id))
            assert item is not None
            assert decode(HostVerdict, item.value, "verdict").round == incident.round, "a verdict on another round"
            is_by_itself = incident.kind in (IncidentKind.STRAGGLER, IncidentKind.NUMERICS)
            assert not is_by_itself or self.policy.eviction == "automatic" or outcome.by, "no person approved it"
            assert not is_by_itself or self.policy.eviction != "dry-run"

    def _check_incident(self, incident: Incident) -> None:
        if incident.kind is IncidentKind.STRAGGLER and incident.incident_id not in self.evictions:
            self.evictions[incident.incident_id] = (incident.moments.detected, len(incident.culprit_hosts))
            recent = [num for at, num in self.evictions.values() if at >= incident.moments.detected - 3600.0]
            assert sum(recent) <= self.policy.evictions_per_hour, "more evictions than allowed"
            others = [decode(Incident, item.value, key) for key, item in self.etcd.items.items()
                      if key.startswith(KEYS.directory("incidents"))]  # fmt: skip
            assert not [
                other for other in others
                if other.state is IncidentState.OPEN and other.incident_id != incident.incident_id
                and other.next_round is not None
            ], "evicted during another recovery"  # fmt: skip


@cache
def _round_of(value: bytes, key: str) -> Round:
    return decode(Round, value, key)


def quiet(policy: Policy) -> Policy:
    """Return a policy whose limits on restarts are never reached."""
    return replace(
        policy,
        restarts_per_hour=10**6,
        restarts_without_progress=10**6,
        hangs_per_hour=10**6,
        host_failures_per_hour=10**6,
    )
