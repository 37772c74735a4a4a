"""One receiver's thread: sends the news about the job, records what was sent, and waits longer after each failure."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.notices import ReceiverRecord
from megatrain.contracts.records.record import decode, encode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.election import Leadership
from megatrain_job.coordination.own_keys import OwnKeys
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_job.coordination.wire import Compare
from megatrain_launcher.notify.delivery import DeliveryError
from megatrain_launcher.notify.message import Message
from megatrain_launcher.notify.plan import Plan, begin_record, plan_of, refused, taken
from megatrain_launcher.notify.receivers import Receiver
from megatrain_launcher.notify.topic_follower import TopicFollower, TopicSnapshot

_logger = logging.getLogger(__name__)
_FIRST_PAUSE_S = 2.0
_MAX_PAUSE_S = 300.0
_WRITE_AGAIN_S = 2.0
_CHECK_S = 60.0


@dataclass(frozen=True, slots=True)
class SenderParts:
    """The parts that a sender uses. `leadership`: the sender works only while this leadership lasts."""

    client: EtcdClient
    keys: JobKeys
    leadership: Leadership
    topics: TopicFollower
    clock: Callable[[], float]


class NoticeSender:
    """Notifies one receiver until `close`, in a separate thread."""

    def __init__(self, parts: SenderParts, receiver: Receiver) -> None:
        self._parts = parts
        self._receiver = receiver
        self._key = parts.keys.notices(receiver.name)
        guard = Compare.create_revision(parts.leadership.key, parts.leadership.token)
        self._own = OwnKeys(parts.client, guard)
        self._record: ReceiverRecord | None = None
        self._written: ReceiverRecord | None = None
        """The record as it is in etcd."""
        self._num_failures = 0
        self._not_before_s = 0.0
        self._refreshed_s = 0.0
        self._problem = ""
        self._checked_s = float("-inf")
        self._closed = threading.Event()
        self._thread = RestartingThread(f"notices to {receiver.name}", self._run, self._closed)

    @property
    def problem(self) -> str:
        """The reason why nothing can be sent to the receiver; empty if it can. The text is constant for one reason."""
        return self._problem or self._thread.problem

    def close(self) -> None:
        """Ask the thread to end; one try to send may still be under way."""
        self._closed.set()
        self._parts.topics.wake()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        seen, wake_s = 0, 0.0
        while not self._closed.is_set():
            found = self._parts.topics.next(seen, wake_s, self._closed)
            if found is None:
                return
            seen = found.number
            if not self._parts.leadership.is_certain:
                wake_s = self._parts.clock() + _WRITE_AGAIN_S
                continue
            wake_s = self._step(found)
            if found.is_last and wake_s > self._parts.clock():
                return  # everything that could be sent has been sent

    def _step(self, found: TopicSnapshot) -> float:
        """Send the message that is due, and return the latest time for the next check. Raises: CoordinationError."""
        now_s = self._parts.clock()
        if self._record is None:
            self._record = self._read() or begin_record(self._receiver.name, found.topics)
        self._check(now_s)
        plan = plan_of(found.topics, self._record, self._receiver.rules, now_s, self._refreshed_s)
        self._record = plan.record
        wake_s = now_s + _CHECK_S if plan.wake_unix_s is None else plan.wake_unix_s
        if plan.topics and now_s >= self._not_before_s:
            wake_s = self._deliver(plan, found, now_s)
        elif plan.topics:
            wake_s = self._not_before_s
        return min(wake_s, self._write(now_s))

    def _deliver(self, plan: Plan, found: TopicSnapshot, now_s: float) -> float:
        """Try to deliver a message; return when to continue."""
        name = self._receiver.name
        message = Message(self._parts.keys.job, plan.topics, found.links, now_s, len(plan.waiting), plan.outdated)
        try:
            answer = self._receiver.try_once(message, found.left_s)
        except DeliveryError as error:
            self._num_failures += 1
            pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(self._num_failures - 1, 10), _MAX_PAUSE_S)
            self._not_before_s = self._parts.clock() + max(pause_s, error.retry_after_s)
            self._record = refused(plan.record, plan, str(error), now_s)
            self._set_problem(_problem_text(name, str(error)))
            return self._not_before_s
        _logger.info("sent to %s: %s (%s)", name, message.title, answer)
        self._num_failures, self._not_before_s, self._refreshed_s, self._problem = 0, 0.0, now_s, ""
        self._record = taken(plan.record, plan, now_s)
        return now_s  # there may be more

    def _check(self, now_s: float) -> None:
        """Report a configuration that prevents sending, before there is a message to send."""
        if now_s - self._checked_s < _CHECK_S:
            return
        self._checked_s = now_s
        problem = self._receiver.problem()
        if problem:
            self._set_problem(_problem_text(self._receiver.name, problem))
        elif not self._num_failures and self._record is not None and not self._record.problem:
            self._problem = ""

    def _set_problem(self, text: str) -> None:
        if text != self._problem:
            _logger.warning("%s", text)
        self._problem = text

    def _read(self) -> ReceiverRecord | None:
        """Return the record of the previous driver. Raises: CoordinationError."""
        item = self._parts.client.get(self._key)
        if item is None:
            return None
        try:
            self._written = decode(ReceiverRecord, item.value, self._key)
        except CoordinationError as error:  # a message sent twice is better than one never sent
            _logger.warning(
                "the record of the messages sent to %s cannot be read, and starts empty: %s", self._receiver.name, error
            )
            return None
        self._problem = _problem_text(self._receiver.name, self._written.problem) if self._written.problem else ""
        return replace(self._written, receiver=self._receiver.name)

    def _write(self, now_s: float) -> float:
        """Write the receiver's record to etcd; return when to try again if etcd does not accept it."""
        if self._record is None or self._record == self._written:
            return float("inf")
        try:
            self._own.put(self._key, encode(self._record))
        except CoordinationError as error:
            _logger.warning("the messages sent to %s cannot be recorded yet: %s", self._receiver.name, error)
            return now_s + _WRITE_AGAIN_S
        self._written = self._record
        return float("inf")


def _problem_text(receiver: str, reason: str) -> str:
    return f"{receiver} cannot be notified of this job and will be tried again: {reason}"
