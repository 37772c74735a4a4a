"""Follows a range of keys: delivers every change once and in order, even if connections and members fail.

A watch continues after the last revision that it delivered, at another member if necessary. If etcd no longer has that
revision, the consumer gets a Snapshot of the whole range instead: changes are never lost or repeated unnoticed. While a
stream is silent, its member must periodically prove that it is up to date, and after a while the stream is opened
again.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import CoordinationError, CoordinationRefusedError
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.errors import CompactedError, InvalidResponseError
from megatrain_job.coordination.event_queue import EventQueue
from megatrain_job.coordination.gateway_response import GatewayError, JsonObject, MalformedError
from megatrain_job.coordination.json_fields import flag_field, header_revision, int_field, list_field
from megatrain_job.coordination.json_stream import JsonStream
from megatrain_job.coordination.settings import Endpoint
from megatrain_job.coordination.watch_event import Changes, Snapshot, WatchEvent, read_change
from megatrain_job.coordination.wire import KeyRange, Range, shown

_logger = logging.getLogger(__name__)
_LONGEST_PAUSE_S = 2.0
_SHORTEST_WAIT_S = 0.001
_SETTLED_S = 0.5
"""etcd sends pending events as soon as a stream is open: a stream of this age has sent all older events."""
_MAX_REFUSALS = 2
"""A token may expire between the member's proof and the watch, so one refusal does not end the watch."""


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """silence_s: after this time without an event the member must prove that it is up to date. renew_s: after this time
    without a message the stream is opened again. capacity: events that wait for the consumer; etcd keeps further ones.
    """

    silence_s: float = 5.0
    renew_s: float = 60.0
    capacity: int = 1024


class Watch(Closable):
    """A thread that follows a range until `close`. Without `start_revision` it begins with a Snapshot."""

    def __init__(
        self,
        client: EtcdClient,
        keys: KeyRange,
        *,
        start_revision: int | None = None,
        limits: WatchLimits | None = None,
    ) -> None:
        self.keys = keys
        self._client = client
        self._gateway = client.gateway
        self._limits = limits or WatchLimits()
        self._next_revision = start_revision
        self._reason = "the beginning"
        self._queue: EventQueue[WatchEvent] = EventQueue(self._limits.capacity)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._stream: JsonStream | None = None
        self._num_failures = 0
        self._num_refusals = 0
        self._problem = ""
        self._confirmed_at: float | None = None
        self._caught_up: Endpoint | None = None
        """The member whose stream is open and has delivered all events so far."""
        self._thread = threading.Thread(target=self._run, name=f"etcd watch {shown(keys.start)}", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str:
        """The reason why no events can be received at the moment; empty if they can."""
        return self._problem

    @property
    def confirmed_at(self) -> float | None:
        """The last time (time.monotonic) at which all events had certainly been received; None before the first time.

        While a stream is open, each call that proves its member to be up to date is such a time.
        """
        confirmed_at, member = self._confirmed_at, self._caught_up
        if confirmed_at is None or member is None:
            return confirmed_at
        return max(confirmed_at, self._gateway.proven_at(member))

    @property
    def is_open(self) -> bool:
        """Whether more events may come."""
        return not self._queue.is_closed

    @property
    def next_revision(self) -> int | None:
        """The next revision to deliver; None until a snapshot sets the beginning of the watch."""
        return self._next_revision

    def next(self, timeout_s: float | None = None) -> WatchEvent | None:
        """Return the next event; None if none came in time, or the watch is closed.

        Raises: CoordinationRefusedError when this user may not read this range.
        """
        return self._queue.take(timeout_s)

    def __iter__(self) -> Iterator[WatchEvent]:
        while (event := self.next()) is not None:
            yield event

    def close(self) -> None:
        """End the thread, and wait for it: `attempt_s` at most, or `call_s` for each page if it reads a snapshot."""
        self._closed.set()
        self._queue.close()
        with self._lock:
            if self._stream is not None:
                self._stream.interrupt()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def _is_over(self) -> bool:
        return self._closed.is_set() or self._gateway.is_closed

    def _run(self) -> None:
        while not self._is_over:
            try:
                if self._next_revision is None:
                    self._reread()
                else:
                    self._follow(self._next_revision)
            except CompactedError as error:
                self._next_revision, self._reason = None, str(error)
                self._pause()
            except CoordinationRefusedError as error:
                self._queue.close(error)
                return
            except CoordinationError as error:
                self._back_off(str(error))
            except Exception as error:  # noqa: BLE001 -- a bug is reported, and does not end the watch
                self._back_off(f"{type(error).__name__}: {error}", bug=error)
        self._queue.close()

    def _back_off(self, reason: str, bug: Exception | None = None) -> None:
        if self._is_over:
            return
        if not self._problem:
            _logger.warning("watch of %s failed and will be opened again: %s", self.keys, reason, exc_info=bug)
        self._problem = reason
        self._pause()

    def _pause(self) -> None:
        self._num_failures += 1
        if self._num_failures > 1:  # after the first failure, another member is asked at once
            pause_s = min(0.05 * 2 ** min(self._num_failures, 10), _LONGEST_PAUSE_S)
            self._closed.wait(pause_s * random.uniform(0.5, 1.0))

    def _reread(self) -> None:
        response = self._client.read_all(self.keys)
        # set before the event is delivered, because `put` may wait for space, or find the queue closed
        self._next_revision = response.revision + 1
        self._queue.put(Snapshot(response.revision, response.items, self._reason))

    def _follow(self, start_revision: int) -> None:
        """Deliver events until the stream ends, or was silent for `renew_s`. Raises: CoordinationError."""
        endpoint = self._gateway.ring.best()
        what = f"etcd watch of {self.keys}"
        self._prove(endpoint, start_revision)
        body = {
            "create_request": self.keys.to_json() | {"start_revision": str(start_revision), "progress_notify": True}
        }
        with self._gateway.open_stream(endpoint, "/v3/watch", body, what=what) as stream:
            with self._lock:
                self._stream = stream
            if self._closed.is_set():  # close() may have been called just before
                return
            try:
                self._listen(stream, endpoint)
            except GatewayError as error:
                self._gateway.record_failure(endpoint, error.message, is_alive=True)
                raise error.typed(what, str(endpoint), shown(self.keys.start)) from error
            except (OSError, InvalidResponseError, MalformedError) as error:
                if not self._is_over:
                    self._gateway.record_failure(endpoint, f"a watch ended: {error}", is_alive=True)
                raise CoordinationError(f"{what} at {endpoint}: {error}", endpoints=(str(endpoint),)) from error
            finally:
                self._confirmed_at, self._caught_up = self.confirmed_at, None
                with self._lock:
                    self._stream = None

    def _listen(self, stream: JsonStream, endpoint: Endpoint) -> None:
        opened_at = confirmed_at = proven_at = time.monotonic()
        while not self._is_over:
            wake_at = proven_at + self._limits.silence_s
            if self._caught_up is None:
                wake_at = min(wake_at, opened_at + _SETTLED_S)
            message = stream.next(max(wake_at - time.monotonic(), _SHORTEST_WAIT_S))
            if message is not None:
                has_events = self._take(message, endpoint)
                confirmed_at = time.monotonic()
                # only events are a proof: a member without contact to the others still sends progress notifications
                proven_at = confirmed_at if has_events else proven_at
            elif time.monotonic() - confirmed_at >= self._limits.renew_s:
                return
            elif self._caught_up is None and time.monotonic() - opened_at >= _SETTLED_S:
                self._record_confirmation(endpoint)
            proven_at = max(proven_at, self._gateway.proven_at(endpoint))
            if time.monotonic() - proven_at >= self._limits.silence_s:
                assert self._next_revision is not None
                self._prove(endpoint, self._next_revision)
                proven_at = time.monotonic()

    def _prove(self, endpoint: Endpoint, next_revision: int) -> None:
        """Check that the member is in contact with a majority, and has the history that this watch follows."""
        revision = self._gateway.call_at(
            endpoint, "/v3/kv/range", Range(KeyRange(self.keys.start), limit=1, has_values=False).to_json(),
            header_revision, what=f"etcd watch of {self.keys}", key=shown(self.keys.start),
        )  # fmt: skip
        _check_history(next_revision, revision)

    def _take(self, message: JsonObject, endpoint: Endpoint) -> bool:
        """Deliver a message's events; return whether it has any. An event proves that the member is in contact with a
        majority of the members.
        """
        if flag_field(message, "canceled"):
            self._take_end(message, endpoint)
        if flag_field(message, "created"):
            return False
        assert self._next_revision is not None
        newest = header_revision(message)
        _check_history(self._next_revision, newest)
        changes = [read_change(raw, self.keys, newest) for raw in list_field(message, "events")]
        if changes or self._caught_up is None:
            self._record_confirmation(endpoint)
        if not changes:
            # a progress notification: all events up to this revision have been sent
            self._advance(newest)
        for revision, group in itertools.groupby(changes, lambda change: change.item.mod_revision):
            if revision >= self._next_revision and self._queue.put(Changes(revision, tuple(group))):
                self._advance(revision)
        return bool(changes)

    def _record_confirmation(self, endpoint: Endpoint) -> None:
        self._num_failures = self._num_refusals = 0
        self._confirmed_at, self._caught_up = time.monotonic(), endpoint
        if self._problem:
            self._problem = ""
            _logger.info("watch of %s continues at %s", self.keys, endpoint)

    def _advance(self, revision: int) -> None:
        assert self._next_revision is not None
        self._next_revision = max(self._next_revision, revision + 1)

    def _take_end(self, message: JsonObject, endpoint: Endpoint) -> None:
        """Raise the error with which etcd ended the watch."""
        compacted = int_field(message, "compact_revision")
        if compacted:
            raise CompactedError(f"etcd keeps no history before revision {compacted}")
        reason = f"{message.get('cancel_reason', 'no reason given')!s:.200}"
        text = f"etcd watch of {self.keys} at {endpoint}: ended by etcd: {reason}"
        if any(word in reason for word in ("ermission", "auth token", "user name is empty", "Unauthenticated")):
            # etcd 3.5 does not report which of these reasons applies
            self._num_refusals += 1
            self._gateway.log_in.drop()
            if self._num_refusals >= _MAX_REFUSALS:
                raise CoordinationRefusedError(text, endpoints=(str(endpoint),), key=shown(self.keys.start))
        raise CoordinationError(text, endpoints=(str(endpoint),), key=shown(self.keys.start))


def _check_history(next_revision: int, newest: int) -> None:
    """Raises: CompactedError when etcd is at an older revision than it reported before."""
    if newest < next_revision - 1:
        raise CompactedError(f"etcd's history went back from revision {next_revision - 1} to {newest}: it was restored")
