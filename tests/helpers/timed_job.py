"""A simulated job with a clock: leases expire, steps take time, hosts freeze, thaw, and obey their deadlines.

Between two moments that a test chooses, everything happens in its order: the actions of etcd, the workers and the
executors. The clock of each host has its own rate. A frozen host executes nothing: deadlines do not constrain what its
processes do when they wake up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megatrain.contracts.records.host_records import HostPhase, Stall
from megatrain.contracts.records.rounds import RoundDeadlines
from megatrain.fencing.fence import Deadlines, FenceAction, LeaseView, StepSilence, fence
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.liveness import orders_lost_after_s
from tests.helpers.simulated_etcd import KEYS
from tests.helpers.simulated_host import SimulatedHost
from tests.helpers.simulated_job import SimulatedJob

_HANG_FACTOR = 10.0
_INIT_S = 1.0
"""From the start of workers until they train."""
_EPSILON_S = 1e-6


@dataclass
class TimedHost(SimulatedHost):
    """A host whose workers complete steps, and whose executor watches its lease. Moments are real time."""

    policy: Policy = field(default_factory=lambda: Policy(min_hosts=1, max_hosts=1, num_workers=1,
                                                         feasible_counts={1: 1}))  # fmt: skip
    clock_rate: float = 1.0
    reaction_s: float = 0.3
    step_s: float = 0.1
    lag: float = 0.0
    """The number of steps by which this host lags behind the others."""
    is_frozen: bool = False
    has_slept: bool = False
    """Whether its processes were suspended since their start: then they may continue for a moment."""
    is_deaf: bool = False
    """Its lease is renewed, but it receives no orders."""
    promised_until: float = -math.inf
    heard_until: float = -math.inf
    started: float = 0.0
    completed: float | None = None
    """The time at which its slowest rank completed its last step of this round."""
    ends_at: float | None = None
    """The time at which its workers will be gone, killed or after a save."""
    asked_to_save: float | None = None
    fenced: bool = False

    @property
    def can_write(self) -> bool:
        return self.is_up and self.is_connected and not self.is_frozen

    def seconds(self, real_s: float) -> float:
        """Return the duration by this host's clock."""
        return real_s * self.clock_rate

    def renew(self, now: float) -> None:
        """Renew the lease, and record that orders arrive."""
        if self.can_write:
            self.promised_until = now + self.policy.lease_ttl_s / self.clock_rate
            if not self.is_deaf:
                self.heard_until = now + orders_lost_after_s(self.policy.lease_ttl_s) / self.clock_rate

    def lease_over(self) -> float:
        return min(self.promised_until, self.heard_until)

    def read_log(self, count: int) -> None:
        if not self.is_deaf and not self.is_frozen:
            super().read_log(count)

    def act(self, now: float) -> None:
        if not self.is_up or self.is_frozen:
            return
        newest = max(self.rounds, default=0)
        if self.running:
            is_over = self.running in self.halts or newest > self.running or self.end is not None
            if is_over and self.ends_at is None:
                self.ends_at = now + 0.1
        elif newest and self.end is None:
            before = self.running
            self._without_workers(newest, now)
            if self.running != before:
                self.started, self.completed, self.ends_at = now, None, None
                self.asked_to_save, self.fenced, self.has_slept = None, False, False

    def silence(self, now: float) -> StepSilence:
        if self.phase is HostPhase.DONE:
            return StepSilence(None, is_ending=True)
        return StepSilence(None if self.completed is None else self.seconds(now - self.completed))

    def limits(self) -> Deadlines:
        """Return the deadlines of the round that runs here, as this host knows them."""
        reported = self.deadlines.get(self.running, RoundDeadlines(self.running))
        return self.policy.fence_rule.deadlines(reported.interval_s, reported.stop_s)

    def judge(self, now: float) -> FenceAction:
        return fence(self.limits(), LeaseView(self.seconds(now - self.lease_over())), self.silence(now))[0]

    def watch(self, now: float) -> None:
        """Do what the executor does by itself at this moment: fence, report a stall, end workers."""
        if not self.is_up or self.is_frozen or not self.running:
            return
        if self.ends_at is not None and now >= self.ends_at:
            self._end(now)
            return
        action = self.judge(now)
        if action is FenceAction.STOP and (self.ends_at is None or self.ends_at > now + self.reaction_s):
            self.fenced, self.ends_at = True, now + self.reaction_s
        elif action is FenceAction.SAVE and self.asked_to_save is None:
            self.fenced, self.asked_to_save = True, now
            reported = self.deadlines.get(self.running, RoundDeadlines(self.running))
            self.ends_at = now + self.policy.fence_rule.grace_s(reported.stop_s) + 2.0
        since = self.started if self.completed is None else self.completed
        silent_s = self.seconds(now - since)
        limit_s = max(self.policy.hang_floor_s, _HANG_FACTOR * self.step_s)
        if silent_s > limit_s and self.stall is None and self.phase is HostPhase.RUNNING:
            self.stall = Stall("step", self.step, silent_s, limit_s, now, (0,))
            self.write_status(now)

    def _end(self, now: float) -> None:
        self.ends_at = None
        number, self.running = self.running, 0
        self.phase = HostPhase.STOPPED if number in self.halts or not self.fenced else HostPhase.FAILED
        self.status_round = number
        self.write_status(now)

    def save_and_exit(self, now: float) -> None:
        """End as workers do that have all agreed to save."""
        number, self.running, self.ends_at = self.running, 0, None
        self.phase = HostPhase.FAILED if self.fenced else HostPhase.DONE
        self.status_round = number
        self.write_status(now)

    def complete(self, now: float) -> None:
        if self.running:
            self.completed, self.stall, self.phase = now, None, HostPhase.RUNNING
            self.step += 1
            self.write_status(now)

    def next_moments(self, now: float) -> list[float]:
        """Return when this host may do something by itself."""
        if not self.is_up or self.is_frozen or not self.running:
            return []
        limits = self.limits()
        over = self.lease_over()
        since = self.started if self.completed is None else self.completed
        moments = [over, over + limits.start_s / self.clock_rate, over + limits.save_s / self.clock_rate,
                   over + limits.end_s / self.clock_rate, since + limits.silent_s / self.clock_rate,
                   since + max(self.policy.hang_floor_s, _HANG_FACTOR * self.step_s) / self.clock_rate]  # fmt: skip
        if self.ends_at is not None:
            moments.append(self.ends_at)
        return [moment + _EPSILON_S for moment in moments if moment + _EPSILON_S > now]


class TimedJob(SimulatedJob):
    """Hosts, etcd's leases and the steps of the round that trains; `advance` lets time pass."""

    def __init__(self, policy: Policy, num_hosts: int, step_s: float) -> None:
        super().__init__(policy, num_hosts)
        self.step_s = step_s
        self.driver_rate = 1.0
        self.has_ended = False
        self.hosts: dict[str, TimedHost] = {  # type: ignore[assignment]
            name: TimedHost(name, self.etcd, policy.num_workers, "s", policy=policy, step_s=step_s)
            for name in self.hosts
        }
        self.next_step_at = math.inf
        self.stepping = 0
        """The round to which `next_step_at` belongs."""
        self.has_contributed: set[str] = set()
        """Hosts that contributed to the step in progress before their fault."""
        self.completions: list[tuple[float, str, int]] = []
        """For hosts that lag behind: the time, the host, and the round."""

    @property
    def driver_now(self) -> float:
        return self.now * self.driver_rate

    def timed(self) -> list[TimedHost]:
        return list(self.hosts.values())  # type: ignore[arg-type]

    def advance(self, seconds: float) -> None:
        """Let time pass; connected hosts renew their leases all the time."""
        end = self.now + seconds
        while self.now < end:
            self.now = min([end, *self._moments()])
            self._happen()
        self.check()

    def decide(self, count: int = 10**6, *, is_answer_lost: bool = False) -> None:
        """Let the driver receive this many events, and decide."""
        self.driver.read_log(count, self.driver_now)
        self.probe(self.driver.decide(self.driver_now, is_answer_lost=is_answer_lost))
        self.check()

    def go_on(self, seconds: float, ticks: int) -> None:
        """Let all hosts receive everything, and the driver decide, `ticks` times."""
        for _ in range(ticks):
            self.advance(seconds / ticks)
            for host in self.timed():
                host.read_log(10**6)
                host.act(self.now)
            self.decide()

    def _moments(self) -> list[float]:
        found = [moment for host in self.timed() for moment in host.next_moments(self.now)]
        found += [host.promised_until + _EPSILON_S for host in self.timed() if not host.can_write]
        found += [at for at, _, _ in self.completions]
        found.append(self.next_step_at)
        return [moment for moment in found if moment > self.now]

    def _happen(self) -> None:
        for host in self.timed():
            host.renew(self.now)
            # etcd counts from the arrival of the renewal
            if self.now > host.promised_until and not host.can_write:
                host.lose_lease()
        for one in [completion for completion in self.completions if completion[0] <= self.now]:
            host = self._host(one[1])
            if not host.is_frozen:  # Messages that arrived while it slept are found when it wakes.
                self.completions.remove(one)
                if host.running == one[2]:
                    host.complete(self.now)
        self._step()
        for host in self.timed():
            host.watch(self.now)

    def _host(self, name: str) -> TimedHost:
        found = self.hosts[name]
        assert isinstance(found, TimedHost)
        return found

    def _step(self) -> None:
        """Complete a step of the training round, when it is time and all of its hosts have contributed."""
        running = {host.running for host in self.timed() if host.running}
        number = max(running, default=0)
        if number != self.stepping:
            self.stepping, self.has_contributed = number, set()
            self.next_step_at = self.now + _INIT_S + self.step_s if number else math.inf
            return
        if self.now < self.next_step_at:
            return
        members = [self._host(part.host) for part in self.rounds()[number].hosts]
        is_whole = all(
            host.name in self.has_contributed or (host.running == number and not host.is_frozen) for host in members
        )
        if not is_whole:
            self.next_step_at = self.now + self.step_s
            return
        is_saving = any(host.asked_to_save is not None for host in members if host.running == number)
        for host in members:
            if host.running == number:
                self.completions.append((self.now + host.lag * self.step_s, host.name, number))
                if is_saving and not host.is_frozen:
                    host.ends_at = None
                    host.save_and_exit(self.now)
        self.has_contributed = set()
        self.next_step_at = self.now + self.step_s

    def check(self) -> None:
        super().check()
        if not hasattr(self, "step_s"):
            return
        newest = max(self.rounds(), default=0)
        for host in self.timed():
            if 0 < host.running < newest:
                assert host.has_slept, f"{host.name} runs round {host.running} although {newest} has begun"
        if KEYS.end in self.etcd.items and not self.has_ended and self.driver.state is not None:
            self.has_ended = True
            known = self.driver.state.hosts
            fit = [
                host.name
                for host in self.timed()
                if host.can_write and not host.is_deaf and not host.running
                and host.name in known and known[host.name].session == host.session
            ]  # fmt: skip
            assert len(fit) < self.policy.min_hosts, f"the job was ended while {fit} were fit"
