"""The orders for this host: the driver's rounds, halts and commands, and the end of the job.

Three watches update one state under one lock: one of `rounds/`, one of `halts/`, and one of the adjacent keys
`commands/`, `deadlines/`, `diag/` and `end`. The agent waits in `next_assignment` for a round. The returned round
counts as taken until the next call, so that a host never reports STOPPED for a round that it is about to start. This
host also adds orders of its own when it is fenced, or when its executor is being stopped.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.diag_records import DiagSettings
from megatrain.contracts.records.job_keys import JobKeys, key_number
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import Halt, HostCommand, JobEnd, Round, RoundDeadlines
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.follower import Follower
from megatrain_job.coordination.watch_event import Change, ChangeKind, Changes, Snapshot, WatchEvent
from megatrain_job.coordination.wire import KeyRange, KeyValue
from megatrain_launcher.interfaces import Assignment

_logger = logging.getLogger(__name__)
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
    `max_unconfirmed_s`: if orders may have been missed for longer than this, `next_assignment` returns no round,
    because the driver may have halted the round and no longer wait for this host.
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
        self._keys = keys
        self._host = host
        self._session = session
        self._on_change = on_change
        self._max_unconfirmed_s = max_unconfirmed_s
        self._changed = threading.Condition()
        self._rounds: dict[int, Round] = {}
        self._halts: dict[int, Halt] = {}
        self._deadlines: dict[int, RoundDeadlines] = {}
        self._commands: dict[int, HostCommand] = {}
        self._end: JobEnd | None = None
        self._diag_settings: DiagSettings | None = None
        self._named = 0
        """The newest round that has included this session; 0: none."""
        self._taken = 0
        self._leave_reason = ""
        self._local_stop = _LocalStop()
        self._save_reason = ""
        self._closed = threading.Event()
        self._followers: list[Follower] = []

    def follow(self, client: EtcdClient) -> None:
        """Start to follow the orders in etcd."""
        keys = self._keys
        rest = KeyRange(keys.directory("commands").encode(), keys.directory("evidence").encode())
        ranges = [KeyRange.prefix(keys.directory("rounds")), KeyRange.prefix(keys.directory("halts")), rest]
        self._followers = [Follower(client, key_range, partial(self.take, keys=key_range)) for key_range in ranges]

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
                if self._end is not None or self._leave_reason:
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
            halt = self._halts.get(number)
            newest = max(self._rounds, default=0)
            if self._local_stop.number == number:
                return self._local_stop.reason
            if halt is not None:
                return halt.reason or f"round {number} was halted"
            if self._end is not None:
                return f"the job is over: {self._end.reason}"
            if newest > number:
                return f"round {newest} has begun"
            return self._leave_reason or self._save_reason

    def is_saving(self, number: int) -> bool:
        """Return whether the workers of a round must be asked to save and stop, instead of being killed.

        False after a halt without a save, or when a newer round exists: the other hosts do not wait for a save either.
        """
        with self._changed:
            if self._end is not None or self._leave_reason or max(self._rounds, default=0) > number:
                return False
            halt = self._halts.get(number)
            if halt is not None and not halt.is_saving:
                return False
            if self._local_stop.number == number:
                return self._local_stop.is_saving
            return halt is not None or bool(self._save_reason)

    def view(self) -> OrdersView:
        with self._changed:
            newest = self._rounds[max(self._rounds)] if self._rounds else None
            return OrdersView(self._taken, newest, max(self._halts, default=0), self._named, self._end)

    def is_halted(self, number: int) -> bool:
        with self._changed:
            return number in self._halts

    def commands_after(self, number: int) -> tuple[HostCommand, ...]:
        """Return the commands to this host with numbers above `number`, in order."""
        with self._changed:
            found = [command for command in self._commands.values() if command.number > number]
        mine = [command for command in found if not command.hosts or self._host in command.hosts]
        return tuple(sorted(mine, key=lambda command: command.number))

    def begin_session(self, session: str) -> bool:
        """Use a new session if the job continued without the current one and no workers of it are left here.

        Return whether the session was changed. If so, only rounds that include the new session apply to this host.
        """
        with self._changed:
            newest = self._rounds[max(self._rounds)] if self._rounds else None
            if self._taken or not needs_new_session(self._host, self._session, self._named, newest):
                return False
            self._session, self._named = session, 0
            return True

    def diag_settings(self) -> DiagSettings | None:
        """Return the settings for the ranks' recording; None if etcd has none."""
        with self._changed:
            return self._diag_settings

    def published_deadlines(self, number: int) -> RoundDeadlines:
        """Return the published deadlines of a round, between steps and for a stop; zeros if there are none."""
        with self._changed:
            return self._deadlines.get(number, RoundDeadlines(number))

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
        """Apply an event of the watch of `keys`. Unreadable values are logged and skipped."""
        with self._changed:
            match event:
                case Snapshot(items=items):
                    self._forget(keys)
                    for item in items:
                        self._put(item)
                case Changes(changes=changes):
                    for change in changes:
                        self._change(change)
            self._changed.notify_all()
        self._on_change()

    def _offered(self, after: int) -> Assignment | None:
        number = max(self._rounds, default=0)
        if number <= after or number in self._halts or self._local_stop.number == number or self._save_reason:
            return None
        part = self._rounds[number].part_of(self._host, self._session)
        return None if part is None else Assignment(self._rounds[number], part)

    def _change(self, change: Change) -> None:
        if change.kind is ChangeKind.PUT:
            self._put(change.item)
            return
        match self._keys.parts(change.item.key.decode(errors="replace")):
            case (name, text) if (number := key_number(text)) is not None and name in self._tables():
                self._tables()[name].pop(number, None)
            case ("end",):
                self._end = None
            case ("diag", "settings"):
                self._diag_settings = None

    def _put(self, item: KeyValue) -> None:
        key = item.key.decode(errors="replace")
        try:
            match self._keys.parts(key):
                case ("rounds", text):
                    found = _of_its_key(decode(Round, item.value, key), text, key)
                    self._rounds[found.number] = found
                    if found.part_of(self._host, self._session) is not None:
                        self._named = max(self._named, found.number)
                case ("halts", text):
                    halt = _of_its_key(decode(Halt, item.value, key), text, key)
                    self._halts[halt.number] = halt
                case ("deadlines", text):
                    deadlines = _of_its_key(decode(RoundDeadlines, item.value, key), text, key)
                    self._deadlines[deadlines.number] = deadlines
                case ("commands", text):
                    command = _of_its_key(decode(HostCommand, item.value, key), text, key)
                    self._commands[command.number] = command
                case ("end",):
                    self._end = decode(JobEnd, item.value, key)
                case ("diag", "settings"):
                    self._diag_settings = decode(DiagSettings, item.value, key)
        except CoordinationError as error:
            _logger.error("an order cannot be read: %s", error)

    def _forget(self, keys: KeyRange) -> None:
        """Remove the orders in the range `keys`, because a snapshot replaces them."""
        for name, table in self._tables().items():
            if keys.start <= self._keys.directory(name).encode() < keys.end:
                table.clear()
        if keys.start <= self._keys.end.encode() < keys.end:
            self._end = None
        if keys.start <= self._keys.diag_settings.encode() < keys.end:
            self._diag_settings = None

    def _tables(self) -> dict[str, dict[int, Any]]:
        return {
            "rounds": self._rounds,
            "halts": self._halts,
            "deadlines": self._deadlines,
            "commands": self._commands,
        }


_Numbered = TypeVar("_Numbered", Round, Halt, RoundDeadlines, HostCommand)


def _of_its_key(record: _Numbered, text: str, key: str) -> _Numbered:
    """Return the record. Raises: CoordinationError if its number differs from the number in its key."""
    if record.number != key_number(text):
        raise CoordinationError(f"{key}: number={record.number}; expected the number in the key")
    return record


def needs_new_session(host: str, session: str, named_in: int, newest: Round | None) -> bool:
    """Return whether the job has continued without this session of the host, so that the host needs a new session.

    `named_in`: the newest round that has included this session; 0: none.
    """
    if newest is None or named_in == 0:
        return False
    return newest.number > named_in and newest.part_of(host, session) is None
