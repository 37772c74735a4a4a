"""The orders for this host: those that etcd has, and those of its own executor.

Three watches of etcd update one state under one lock. The agent waits in `next_assignment` for a round. The returned
round counts as taken until the next call, so that a host never reports STOPPED for a round that it is about to start.
The executor adds its own orders when the host is fenced, or when the executor is being stopped.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatrain.contracts.closable import Closable
from megatrain.contracts.records.diag_records import DiagSettings
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.rounds import HostCommand, JobEnd, Round, RoundDeadlines, RoundHost
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.follower import Follower
from megatrain_job.coordination.watch_event import WatchEvent
from megatrain_job.coordination.wire import KeyRange
from megatrain_launcher.executor.driver_orders import DriverOrders
from megatrain_launcher.interfaces import Assignment

_POLL_S = 0.05
"""The interval at which a waiting thread checks whether orders are confirmed; a confirmation does not wake it."""


@dataclass(frozen=True, slots=True)
class OrdersView:
    """The orders at one time. `taken_round`: the round that this host starts, runs or stops; 0: none."""

    taken_round: int
    newest: Round | None
    newest_halt: int
    """The highest number of a halted round; 0: none."""
    named_in: int
    """The newest round that has included this session of the host; 0: none."""
    end: JobEnd | None


@dataclass(frozen=True, slots=True)
class _LocalStop:
    """A local order to stop a round; number 0: none."""

    number: int = 0
    reason: str = ""
    is_saving: bool = False


class OrderState(Closable):
    """Follows the orders for one host. Implements `interfaces.Orders`; thread-safe.

    `on_change` is called after each change, possibly by a watching thread: it must be quick and must not raise.
    `max_unconfirmed_s`: if orders may have been missed for longer than this, `next_assignment` waits, because the
    driver may have halted the round and no longer wait for this host.
    """

    def __init__(
        self,
        keys: JobKeys,
        host: str,
        session: str,
        on_change: Callable[[], None] = lambda: None,
        *,
        max_unconfirmed_s: float = math.inf,
    ) -> None:
        self._host = host
        self._session = session
        self._on_change = on_change
        self._max_unconfirmed_s = max_unconfirmed_s
        self._changed = threading.Condition()
        self._orders = DriverOrders(keys)
        self._named = 0
        """The newest round that has included this session; 0: none."""
        self._taken = 0
        self._leave_reason = ""
        self._local_stop = _LocalStop()
        self._save_reason = ""
        self._followers: list[Follower] = []

    def follow(self, client: EtcdClient) -> None:
        """Start to follow the orders in etcd."""
        self._followers = [
            Follower(client, key_range, partial(self.take, keys=key_range)) for key_range in self._orders.key_ranges
        ]

    def close(self) -> None:
        """Stop following; a thread that waits in `next_assignment` returns."""
        self.leave(self._leave_reason or "the executor ends")
        for follower in self._followers:
            follower.close()

    @property
    def problem(self) -> str:
        """The reason why orders may currently not arrive; empty while they arrive."""
        return next((follower.problem for follower in self._followers if follower.problem), "")

    @property
    def unconfirmed_s(self) -> float:
        """The seconds for which orders may have been missed."""
        return max((follower.unconfirmed_s for follower in self._followers), default=0.0)

    def next_assignment(self, after: int) -> Assignment | None:
        """Wait for a round above `after` that includes this host; None: the job is over, or this host leaves it."""
        with self._changed:
            self._taken = 0
            self._changed.notify_all()
        self._on_change()
        with self._changed:
            while True:
                if self._orders.end is not None or self._leave_reason:
                    return None
                assignment = self._offered(after)
                if assignment is None:
                    self._changed.wait()
                elif self.unconfirmed_s > self._max_unconfirmed_s:
                    self._changed.wait(_POLL_S)
                else:
                    self._taken = assignment.round.number
                    break
        self._on_change()
        return assignment

    def stop_reason(self, number: int) -> str:
        """Return why the workers of a round must be stopped now; empty while they may run."""
        with self._changed:
            halt, end, newest = self._orders.halts.get(number), self._orders.end, self._orders.newest_number
            if self._local_stop.number == number:
                return self._local_stop.reason
            if halt is not None:
                return halt.reason or f"round {number} was halted"
            if end is not None:
                return f"the job is over: {end.reason}"
            if newest > number:
                return f"round {newest} has begun"
            return self._leave_reason or self._save_reason

    def is_saving(self, number: int) -> bool:
        """Return whether the workers of a round must be asked to save and stop, instead of being killed.

        False if the job is over, if this host leaves, if a newer round exists, after a halt without a save, after a
        local order to kill them, or without any order to stop.
        """
        with self._changed:
            if self._orders.end is not None or self._leave_reason or self._orders.newest_number > number:
                return False
            halt = self._orders.halts.get(number)
            if halt is not None and not halt.is_saving:
                return False
            if self._local_stop.number == number:
                return self._local_stop.is_saving
            return halt is not None or bool(self._save_reason)

    def view(self) -> OrdersView:
        with self._changed:
            newest_halt = max(self._orders.halts, default=0)
            return OrdersView(self._taken, self._orders.newest_round, newest_halt, self._named, self._orders.end)

    def is_halted(self, number: int) -> bool:
        with self._changed:
            return number in self._orders.halts

    def commands_after(self, number: int) -> tuple[HostCommand, ...]:
        """Return the commands to this host with numbers above `number`, in order."""
        with self._changed:
            found = [command for command in self._orders.commands.values() if command.number > number]
        mine = [command for command in found if not command.hosts or self._host in command.hosts]
        return tuple(sorted(mine, key=lambda command: command.number))

    def begin_session(self, session: str) -> bool:
        """Use a new session if the job continued without the current one and no workers of it are left here.

        Return whether the session was changed. If so, only rounds that include the new session apply to this host.
        """
        with self._changed:
            newest = self._orders.newest_round
            if self._taken or not needs_new_session(self._host, self._session, self._named, newest):
                return False
            self._session, self._named = session, 0
            return True

    def diag_settings(self) -> DiagSettings | None:
        """Return the settings for the ranks' recording; None if etcd has none."""
        with self._changed:
            return self._orders.diag_settings

    def published_deadlines(self, number: int) -> RoundDeadlines:
        """Return the published interval and stop time of a round; zeros if none are published."""
        with self._changed:
            return self._orders.deadlines.get(number, RoundDeadlines(number))

    def stop_round(self, number: int, reason: str, *, is_saving: bool = False) -> None:
        """Order the workers of one round to be killed, or to save and stop, for a reason on this host."""
        with self._changed:
            self._local_stop = _LocalStop(number, reason, is_saving)
            self._changed.notify_all()
        self._on_change()

    def save_and_stop(self, reason: str) -> None:
        """Order the workers to save and stop, without an order of the driver."""
        with self._changed:
            self._save_reason = reason
            self._changed.notify_all()

    def leave(self, reason: str) -> None:
        """Order the workers to be killed and the agent to return."""
        with self._changed:
            self._leave_reason = reason
            self._changed.notify_all()
        self._on_change()

    def wait_for(self, is_met: Callable[[OrdersView], bool], timeout_s: float) -> bool:
        """Wait until the orders meet a condition, and return whether they did in time. `is_met` must be quick."""
        with self._changed:
            return self._changed.wait_for(lambda: is_met(self.view()), timeout_s)

    def take(self, event: WatchEvent, keys: KeyRange) -> None:
        """Apply an event of the watch of `keys`."""
        with self._changed:
            self._orders.apply(event, keys)
            newer = (round_ for number, round_ in self._orders.rounds.items() if number > self._named)
            named = (round_.number for round_ in newer if self._part_in(round_) is not None)
            self._named = max(named, default=self._named)
            self._changed.notify_all()
        self._on_change()

    def _offered(self, after: int) -> Assignment | None:
        newest = self._orders.newest_round
        if newest is None or newest.number <= after or newest.number in self._orders.halts:
            return None
        if self._local_stop.number == newest.number or self._save_reason:
            return None
        part = self._part_in(newest)
        return None if part is None else Assignment(newest, part)

    def _part_in(self, round_: Round) -> RoundHost | None:
        return round_.part_of(self._host, self._session)


def needs_new_session(host: str, session: str, named_in: int, newest: Round | None) -> bool:
    """Return whether the job has continued without this session of the host, so that the host needs a new session.

    `named_in`: the newest round that has included this session; 0: none.
    """
    if newest is None or named_in == 0:
        return False
    return newest.number > named_in and newest.part_of(host, session) is None
