"""A job without processes: an etcd of dicts, hosts that obey the driver's protocol, drivers that really decide.

Every part sees etcd through its own place in the log of changes, so that a test chooses all delays. What must hold at
any moment is checked by `check`, after each change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.host_records import (
    HostPhase,
    HostRecord,
    HostSaves,
    HostStatus,
    Milestones,
    RankFailure,
    Stall,
)
from megatrain.contracts.host_verdict import HostVerdict, OutcomeKind, VerdictOutcome
from megatrain.contracts.incident import Incident, IncidentKind, IncidentState
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.record import decode, encode
from megatrain.contracts.rounds import Halt, JobEnd, Round, RoundDeadlines
from megatrain.coordination.watch import Change, ChangeKind, Changes, Snapshot
from megatrain.coordination.wire import Compare, Delete, KeyValue, Operation, Put, Relation, Target, as_bytes
from megatrain_launcher.driver.actions import Decision, Probe
from megatrain_launcher.driver.decide import decide
from megatrain_launcher.driver.folding import fold
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.probe import ProbeResult
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.driver.writes import writes_of
from megatrain_launcher.executor.liveness import Vitality
from tests.helpers.job_history import JobHistory

KEYS = JobKeys("sim")


class SimulatedEtcd:
    """Keys with revisions, transactions, and the log of all changes."""

    def __init__(self) -> None:
        self.revision = 1
        self.items: dict[str, KeyValue] = {}
        self.log: list[Changes] = []

    def put(self, key: str, value: bytes) -> None:
        assert self.txn((), (Put(key, value),))

    def delete(self, keys: Iterable[str]) -> None:
        present = [key for key in keys if key in self.items]
        if present:
            self._apply([(key, None, 0) for key in present])

    def txn(self, conditions: Sequence[Compare], operations: Sequence[Operation]) -> bool:
        """Apply all operations if all conditions hold; return whether they did."""
        if not all(self._is_met(condition) for condition in conditions):
            return False
        changes: list[tuple[str, bytes | None, int]] = []
        for one in operations:
            if isinstance(one, Put):
                key = as_bytes(one.key).decode()
                lease_id = self.items[key].lease_id if one.is_lease_kept else one.lease_id
                changes.append((key, as_bytes(one.value), lease_id))
            elif isinstance(one, Delete) and one.keys.start.decode() in self.items:
                changes.append((one.keys.start.decode(), None, 0))
        assert len({key for key, _, _ in changes}) == len(changes), "etcd refuses a key that is put twice"
        self._apply(changes)
        return True

    def snapshot(self) -> Snapshot:
        return Snapshot(self.revision, tuple(self.items.values()), "asked")

    def _apply(self, changes: Sequence[tuple[str, bytes | None, int]]) -> None:
        self.revision += 1
        told: list[Change] = []
        for key, value, lease_id in changes:
            before = self.items.pop(key, None)
            if value is None:
                told.append(Change(ChangeKind.DELETE, KeyValue(key.encode(), b"", 0, self.revision, 0, 0)))
                continue
            created = self.revision if before is None else before.create_revision
            self.items[key] = KeyValue(key.encode(), value, created, self.revision, 1, lease_id)
            told.append(Change(ChangeKind.PUT, self.items[key]))
        self.log.append(Changes(self.revision, tuple(told)))

    def _is_met(self, condition: Compare) -> bool:
        item = self.items.get(condition.key.decode())
        revisions = {Target.CREATE_REVISION: "create_revision", Target.MOD_REVISION: "mod_revision"}
        found = 0 if item is None else getattr(item, revisions[condition.target])
        assert isinstance(condition.operand, int)
        return found == condition.operand if condition.relation is Relation.EQUAL else found > condition.operand


@dataclass
class SimulatedHost:
    """An executor and its workers, as far as the driver can tell. `place`: how much of the log it has read."""

    name: str
    etcd: SimulatedEtcd
    num_workers: int
    switch: str
    life: int = 0
    place: int = 0
    is_up: bool = False
    is_connected: bool = True
    """To etcd and to the driver."""
    running: int = 0
    """The round whose workers live here, 0 for none."""
    took_part_in: int = 0
    step: int = 0
    phase: HostPhase = HostPhase.PARKED
    status_round: int = 0
    failures: tuple[RankFailure, ...] = ()
    stall: Stall | None = None
    saves: HostSaves | None = None
    step_s: float = 0.1
    rounds: dict[int, Round] = field(default_factory=dict)
    deadlines: dict[int, RoundDeadlines] = field(default_factory=dict)
    halts: dict[int, Halt] = field(default_factory=dict)
    end: JobEnd | None = None

    @property
    def session(self) -> str:
        return f"{self.name}-life-{self.life}"

    @property
    def can_write(self) -> bool:
        return self.is_up and self.is_connected

    @property
    def is_registered(self) -> bool:
        """Whether etcd has this life of the host; the lease of the one before may still stand."""
        item = self.etcd.items.get(KEYS.host(self.name))
        return item is not None and decode(HostRecord, item.value, "host").session == self.session

    def start(self, now: float) -> None:
        """Begin a new life: nothing of the one before is left."""
        self.life += 1
        self.is_up, self.running, self.took_part_in = True, 0, 0
        self.phase, self.status_round, self.failures, self.stall = HostPhase.PARKED, 0, (), None
        self.register(now)

    def register(self, now: float) -> None:
        if self.can_write:
            record = HostRecord(
                host=self.name, session=self.session, pid=1, address=self.name, store_port=1, liveness_port=2,
                num_workers=self.num_workers, config_hash="", version="", hardware="", joined_unix_s=now, is_fit=True,
                labels={"switch": self.switch},
            )  # fmt: skip
            self.etcd.put(KEYS.host(self.name), encode(record))
            self.tell(now)

    def kill(self) -> None:
        """End the executor; its workers die with it."""
        self.is_up, self.running = False, 0

    def lose_lease(self) -> None:
        """Let etcd forget the host: it is dead, or cut off."""
        self.etcd.delete([KEYS.host(self.name), KEYS.status(self.name)])

    def fail(self, now: float, *, is_cascade: bool, exit_code: int = -9, label: str = "", action: str = "") -> None:
        """Let a worker die."""
        if self.running and self.is_up:
            part = self.rounds[self.running].part_of(self.name, self.session)
            assert part is not None
            failure = RankFailure(part.first_rank, exit_code, now, label, action, is_cascade)
            self.failures, self.phase, self.running = (failure,), HostPhase.FAILED, 0
            self.tell(now)

    def hear(self, count: int) -> None:
        """Read on in the log."""
        if not self.is_connected:
            return
        for changes in self.etcd.log[self.place : self.place + count]:
            for change in changes.changes:
                with suppress(CoordinationError):  # what cannot be read is passed over
                    self._note(change)
        self.place = min(self.place + count, len(self.etcd.log))

    def _note(self, change: Change) -> None:
        key = change.item.key.decode()
        match KEYS.parts(key), change.kind:
            case ("rounds", number), ChangeKind.PUT:
                self.rounds[int(number)] = decode(Round, change.item.value, key)
            case ("halts", number), ChangeKind.PUT:
                self.halts[int(number)] = decode(Halt, change.item.value, key)
            case ("deadlines", number), ChangeKind.PUT:
                self.deadlines[int(number)] = decode(RoundDeadlines, change.item.value, key)
            case ("end",), ChangeKind.PUT:
                self.end = decode(JobEnd, change.item.value, key)

    def act(self, now: float) -> None:
        """Obey what was heard: stop, start, or complete a step."""
        if not self.is_up:
            return
        newest = max(self.rounds, default=0)
        if self.end is not None:
            self.running = 0
        elif self.running:
            if self.running in self.halts or newest > self.running:
                self._stopped(self.running, now)
            else:
                self._train(now)
        elif newest:
            self._without_workers(newest, now)

    def fence(self, now: float) -> None:
        """Stop the workers of a host that is cut off and sees no step."""
        if self.is_up and not self.is_connected and self.running:
            self._stopped(self.running, now)

    def _stopped(self, number: int, now: float) -> None:
        self.running, self.phase, self.status_round = 0, HostPhase.STOPPED, number
        self.tell(now)

    def _train(self, now: float) -> None:
        if self.phase is HostPhase.STARTING:
            self.phase = HostPhase.RUNNING
        elif self.stall is None:
            self.step += 1
        self.tell(now)

    def _without_workers(self, newest: int, now: float) -> None:
        round_ = self.rounds[newest]
        is_mine = round_.part_of(self.name, self.session) is not None
        if is_mine and newest not in self.halts and self.status_round < newest:
            self.running = self.took_part_in = self.status_round = newest
            self.phase, self.failures, self.stall, self.step = HostPhase.STARTING, (), None, 0
            self.tell(now)
        elif is_mine and newest in self.halts and self.phase is not HostPhase.STOPPED:
            self._stopped(newest, now)
        elif not is_mine and newest > self.took_part_in > 0 and self.can_write:
            self.start(now)

    def tell(self, now: float) -> None:
        """Write the status."""
        if not self.can_write or KEYS.host(self.name) not in self.etcd.items:
            return
        is_running = self.phase is HostPhase.RUNNING
        milestones = Milestones(now, now, now, now) if is_running else Milestones()
        status = HostStatus(
            self.name, self.session, self.phase, self.status_round, alive_ranks="1" if self.running else "",
            min_step=self.step if is_running else None, resumed_step=0, median_step_s=self.step_s,
            milestones=milestones, failures=self.failures, stall=self.stall,
            interval_s=self.step_s if self.step else None, stop_s=1.5 * self.step_s if self.step else None,
            saves=self.saves,
        )  # fmt: skip
        self.etcd.put(KEYS.status(self.name), encode(status))


@dataclass
class SimulatedDriver:
    """A candidate that leads: it folds, decides, and writes with the guards of the real one."""

    name: str
    etcd: SimulatedEtcd
    policy: Policy
    token: int = 0
    mark: int = 0
    awaited: int = 0
    place: int = 0
    state: ClusterState | None = None
    late: list[tuple[tuple[Compare, ...], tuple[Operation, ...]]] = field(default_factory=list)
    """Transactions without an answer, which etcd may still apply."""

    @property
    def key(self) -> str:
        return f"{KEYS.election}/{self.name}"

    def take_over(self, now: float) -> None:
        """Win the election: the leader before loses its key."""
        self.etcd.delete([key for key in self.etcd.items if key.startswith(f"{KEYS.election}/")])
        assert self.etcd.txn((), (Put(self.key, b"", lease_id=1),))
        self.token = self.etcd.items[self.key].create_revision
        self.read_anew(now)

    def read_anew(self, now: float) -> None:
        """Renew the mark, and only then read: nothing that was given up can be applied any more."""
        if not self.etcd.txn(
            (Compare.create_revision(self.key, self.token),), (Put(self.key, b"", is_lease_kept=True),)
        ):
            return
        self.mark = self.awaited = self.etcd.revision
        self.place = len(self.etcd.log)
        self.state = fold(ClusterState(KEYS, self.name, now), self.etcd.snapshot(), now)

    def hear(self, count: int, now: float) -> None:
        if self.state is None:
            return
        for changes in self.etcd.log[self.place : self.place + count]:
            self.state = fold(self.state, changes, now)
        self.place = min(self.place + count, len(self.etcd.log))

    def decide(self, now: float, *, is_answer_lost: bool = False) -> Decision | None:
        """Decide and write, if everything of before was seen; a lost answer leaves the transaction under way.

        After that nothing is decided until the mark is renewed, at the next call.
        """
        if self.state is None:
            self.read_anew(now)
        if self.state is None or self.state.revision < self.awaited:
            return None
        decision = decide(now, self.state, self.policy)
        writes = writes_of(decision.actions, KEYS, damaged=self.state.damaged_revisions)
        if not writes.operations:
            return decision
        guards = (
            Compare.create_revision(self.key, self.token),
            Compare.mod_revision(self.key, self.mark),
            *writes.conditions,
        )
        operations = (*writes.operations, Put(self.key, b"", is_lease_kept=True))
        if is_answer_lost:
            self.late.append((guards, operations))
            self.state = None
        elif self.etcd.txn(guards, operations):
            self.mark = self.awaited = self.etcd.revision
        else:
            self.read_anew(now)
        return decision

    def apply_late(self) -> bool:
        """Let etcd apply a transaction whose answer was lost long ago; return whether its conditions still held."""
        guards, operations = self.late.pop(0)
        is_given_up = self.state is not None
        is_applied = self.etcd.txn(guards, operations)
        assert not (is_applied and is_given_up), "a decision that was given up was applied"
        return is_applied


class SimulatedJob:
    """All hosts, one driver after the other, and what must always hold."""

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
        """For slowness, by incident: when, and how many hosts."""

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
                    vitality = Vitality.UNKNOWN
                elif host.is_up and host.session == action.session:
                    vitality = Vitality.ALIVE
                else:
                    vitality = Vitality.DEAD
                results.append(ProbeResult(action.host, action.session, vitality, "probed", self.now))
        if results and self.driver.state is not None:
            self.driver.state = self.driver.state.with_probes(tuple(results))

    def settle(self, limit_s: float) -> float:
        """Let faults be over and time pass until all hosts of a live round train; return how long that took."""
        begin = self.now
        for host in self.hosts.values():
            host.stall, host.is_connected = None, True
            if not host.is_up:
                host.start(self.now)
            if not host.is_registered:
                host.register(self.now)
            host.tell(self.now)
        while self.now < begin + limit_s:
            self.now += 0.2
            for host in self.hosts.values():
                host.hear(len(self.etcd.log))
                host.act(self.now)
            self.driver.hear(len(self.etcd.log), self.now)
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
        """Raise AssertionError when anything that must always hold does not."""
        for changes in self.etcd.log[self.checked :]:
            self.history.take(changes)
            for change in changes.changes:
                if change.kind is ChangeKind.PUT:
                    with suppress(CoordinationError):
                        self._check_write(change.item)
        self.checked = len(self.etcd.log)
        live = self.live_rounds()
        assert len(live) <= 1, "two live rounds"
        newest = max(self.rounds(), default=0)
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
            assert not is_by_itself or self.policy.eviction == "automatic" or outcome.by, "nobody approved it"
            assert not is_by_itself or self.policy.eviction != "dry-run"

    def _check_incident(self, incident: Incident) -> None:
        if incident.kind is IncidentKind.STRAGGLER and incident.incident_id not in self.evictions:
            self.evictions[incident.incident_id] = (incident.moments.detected, len(incident.culprit_hosts))
            recent = [num for at, num in self.evictions.values() if at >= incident.moments.detected - 3600.0]
            assert sum(recent) <= self.policy.evictions_per_hour, "more evictions than allowed"
            others = [decode(Incident, item.value, key) for key, item in self.etcd.items.items()
                      if key.startswith(KEYS.directory("incidents"))]  # fmt: skip
            assert not [
                one for one in others
                if one.state is IncidentState.OPEN and one.incident_id != incident.incident_id
                and one.next_round is not None
            ], "evicted while another recovery goes on"  # fmt: skip


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
