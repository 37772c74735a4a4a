"""Calls to etcd's JSON gateway: other endpoints after an error, one deadline for all tries, renewal of tokens.

A request that was sent and not answered may have been applied. It is sent again only if its caller has marked it as
safe to apply twice; otherwise UnknownOutcomeError is raised. Measurements led to these rules: no client on PyPI
survives a restart of etcd (ADR 0018).
"""

from __future__ import annotations

import json
import logging
import math
import random
import re
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from megatrain.contracts.errors import CoordinationError
from megatrain_job.coordination.connections import Connections
from megatrain_job.coordination.errors import AttemptError, InvalidResponseError, UnknownOutcomeError
from megatrain_job.coordination.gateway_response import (
    GatewayError,
    JsonObject,
    MalformedError,
    read_response,
    without_envelope,
)
from megatrain_job.coordination.http_exchange import HttpExchange
from megatrain_job.coordination.json_stream import JsonStream
from megatrain_job.coordination.log_in import LogIn
from megatrain_job.coordination.settings import Endpoint, EtcdSettings
from megatrain_job.coordination.transport import Deadline, EndpointRing, EtcdConnection, failure_text

Answer = TypeVar("Answer")
_logger = logging.getLogger(__name__)
_CLUSTER_ID = re.compile(r"[0-9]{1,20}", re.ASCII)
_BY_MAJORITY = ("/v3/kv/", "/v3/lease/")
"""Calls that a member answers only while it is in contact with a leader: all reads here are linearizable."""
_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Pauses, in seconds, after each pass over all endpoints; the last one repeats."""
_SLOW_AFTER_PART = 0.3
"""A timeout shows that a member is frozen if the time limit was at least this fraction of `attempt_s`."""
_SHORTEST_TRY_S = 0.05
"""With less time left, no further try is made: it would only replace an informative error with "no answer in time"."""


class Gateway:
    """The shared state of a client's calls: connections, order of endpoints, token. Safe to use from many threads."""

    def __init__(self, settings: EtcdSettings) -> None:
        self.settings = settings
        # each client has a random order of the members, so that a thousand hosts are spread over all members
        self.ring = EndpointRing(random.sample(settings.endpoints, len(settings.endpoints)))
        self._connections = Connections(settings)
        self._lock = threading.Lock()
        self._streams: set[JsonStream] = set()
        self._closed = threading.Event()
        self._slow_after_s = _SLOW_AFTER_PART * settings.attempt_s
        self.log_in = LogIn(settings.credentials, self._exchange, self.record_failure, slow_after_s=self._slow_after_s)
        self._cluster_id: str | None = None
        self._proven_at = dict.fromkeys(settings.endpoints, -math.inf)

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """Close all connections; calls and streams in progress fail at once."""
        self._closed.set()
        self._connections.close()
        with self._lock:
            for stream in self._streams:
                stream.interrupt()

    def call(
        self,
        path: str,
        body: JsonObject,
        decode: Callable[[JsonObject], Answer],
        *,
        what: str,
        key: str | None = None,
        deadline_s: float | None = None,
        is_write: bool = False,
        is_repeatable: bool = True,
    ) -> Answer:
        """Return the decoded response of the first endpoint that answers before the deadline.

        Raises: CoordinationError naming `what`, the endpoints and why each failed; UnknownOutcomeError when the call is
        not repeatable and may have been applied; the typed errors of etcd's own responses.
        """
        deadline = Deadline(self.settings.call_s if deadline_s is None else deadline_s)
        reasons: dict[Endpoint, str] = {}
        may_have_applied = False
        tries = 0
        while not tries or deadline.left_s > _SHORTEST_TRY_S:
            self._check_open(what, key)
            endpoint = self.ring.best()
            try:
                return self._attempt(endpoint, path, body, decode, what, key, deadline.part(self.settings.attempt_s))
            except AttemptError as error:
                reasons[endpoint] = str(error)
                may_have_applied |= is_write and error.may_have_applied
                if error.may_have_applied and not is_repeatable:
                    raise UnknownOutcomeError(
                        f"{what}: sent to {endpoint}, but {error}; it may have been applied",
                        endpoints=(str(endpoint),), key=key, may_have_applied=True,
                    ) from error  # fmt: skip
            tries += 1
            if tries % len(self.ring) == 0:
                pause_s = _PAUSES_S[min(tries // len(self.ring), len(_PAUSES_S)) - 1] * random.uniform(0.5, 1.5)
                self._closed.wait(min(pause_s, max(deadline.left_s, 0.0)))
        self._check_open(what, key)
        shown = ", ".join(f"{endpoint} ({reason})" for endpoint, reason in reasons.items())
        more = "; it may have been applied" if may_have_applied else ""
        raise CoordinationError(
            f"{what}: no answer from etcd within {deadline.seconds:.1f} s: {shown}{more}",
            endpoints=[str(endpoint) for endpoint in reasons], key=key, may_have_applied=may_have_applied,
        )  # fmt: skip

    def call_at(
        self,
        endpoint: Endpoint,
        path: str,
        body: JsonObject,
        decode: Callable[[JsonObject], Answer],
        *,
        what: str,
        key: str | None = None,
    ) -> Answer:
        """Send one request to one endpoint; only a refused token leads to a second try.

        Raises: as `call`, except UnknownOutcomeError.
        """
        self._check_open(what, key)
        deadline = Deadline(self.settings.attempt_s)
        try:
            return self._attempt(endpoint, path, body, decode, what, key, deadline)
        except AttemptError as error:
            raise CoordinationError(
                f"{what}: no answer from {endpoint}: {error}",
                endpoints=(str(endpoint),), key=key, may_have_applied=error.may_have_applied,
            ) from error  # fmt: skip

    def open_stream(self, endpoint: Endpoint, path: str, body: JsonObject, *, what: str) -> JsonStream:
        """Start a call with a streamed response; the caller closes the stream. Raises: CoordinationError."""
        deadline = Deadline(self.settings.attempt_s)
        try:
            token = self.log_in.token(endpoint, what, deadline)
            connection = self._connections.open(endpoint, deadline)
            exchange = HttpExchange(endpoint.authority, path, _encode(body), token, is_last=True)
            stream = JsonStream(connection, exchange, self._forget_stream)
            with self._lock:
                self._streams.add(stream)
            if self.is_closed:  # checked after it was added, so that either this check or close() interrupts the stream
                stream.interrupt()
            try:
                stream.start(deadline)
            except BaseException:
                stream.close()
                raise
        except (OSError, InvalidResponseError) as error:
            # a malformed answer to one watch does not show that the other streams are broken
            self.record_failure(endpoint, failure_text(error), is_alive=isinstance(error, InvalidResponseError))
            raise CoordinationError(
                f"{what}: no answer from {endpoint}: {failure_text(error)}", endpoints=(str(endpoint),)
            ) from error
        except AttemptError as error:
            raise CoordinationError(
                f"{what}: no answer from {endpoint}: {error}", endpoints=(str(endpoint),)
            ) from error
        except GatewayError as error:
            self.log_in.drop_refused(token, error)
            raise error.typed(what, str(endpoint), None) from error
        return stream

    def proven_at(self, endpoint: Endpoint) -> float:
        """Return the start (time.monotonic) of the last call that proved the member to be in contact with a leader."""
        return self._proven_at[endpoint]

    def record_failure(self, endpoint: Endpoint, reason: str, *, is_alive: bool = False) -> None:
        """Prefer other endpoints from now on. Unless `is_alive`, also interrupt this endpoint's streams: no watch may
        rely on a frozen member.
        """
        if self.is_closed:
            return
        if self.ring.failed(endpoint):
            _logger.warning("etcd endpoint %s failed: %s", endpoint, reason)
        if not is_alive:
            with self._lock:
                for stream in self._streams:
                    if stream.endpoint == endpoint:
                        stream.interrupt()

    def _attempt(
        self,
        endpoint: Endpoint,
        path: str,
        body: JsonObject,
        decode: Callable[[JsonObject], Answer],
        what: str,
        key: str | None,
        deadline: Deadline,
    ) -> Answer:
        for is_second in (False, True):
            asked_at = time.monotonic()
            token = self.log_in.token(endpoint, what, deadline)
            try:
                response = self._exchange(endpoint, path, body, token, deadline)
                cluster_id = self._cluster_of(response, endpoint)
                decoded = decode(response)
            except GatewayError as error:
                if self.log_in.drop_refused(token, error) and not is_second:
                    continue
                if not error.is_passing:
                    self._record_success(endpoint)
                    raise error.typed(what, str(endpoint), key) from error
                self.record_failure(endpoint, error.message, is_alive=True)
                raise AttemptError(error.message, may_have_applied=error.may_have_applied) from error
            except (MalformedError, KeyError, TypeError, ValueError) as error:
                self.record_failure(endpoint, f"an answer that is not etcd's: {error}")
                raise AttemptError(f"an answer that is not etcd's: {error}", may_have_applied=True) from error
            # only after the response was decoded: an id in a malformed response must not be used
            with self._lock:
                self._cluster_id = self._cluster_id or cluster_id
            self._record_success(endpoint)
            if path.startswith(_BY_MAJORITY):
                self._proven_at[endpoint] = asked_at
            return decoded
        raise AssertionError("the second try returns or raises")

    def _exchange(
        self, endpoint: Endpoint, path: str, body: JsonObject, token: str | None, deadline: Deadline
    ) -> JsonObject:
        """Send one request and return its response. Raises: GatewayError, AttemptError."""
        was_sent = False
        connection: EtcdConnection | None = None
        is_reusable = False
        try:
            exchange = HttpExchange(endpoint.authority, path, _encode(body), token, is_last=False)
            connection = self._connections.take(endpoint, deadline)
            connection.send(exchange.request, deadline)
            was_sent = True  # not before: etcd cannot apply part of a request
            content = connection.read_response(exchange, deadline)
            is_reusable = not exchange.is_last
            return without_envelope(read_response(exchange.status, content))
        except (OSError, InvalidResponseError) as error:
            reason = failure_text(error)
            # a short timeout does not show that the member and its streams are frozen
            is_proof = not isinstance(error, TimeoutError) or deadline.seconds >= self._slow_after_s
            self.record_failure(endpoint, reason, is_alive=not is_proof)
            raise AttemptError(reason, may_have_applied=was_sent) from error
        finally:
            if connection is not None:
                self._connections.give_back(connection, is_reusable=is_reusable)

    @property
    def cluster_id(self) -> str:
        """The cluster's id; empty before its first response."""
        return self._cluster_id or ""

    def _cluster_of(self, response: JsonObject, endpoint: Endpoint) -> str | None:
        """Return the cluster id in a response; None for an empty response of etcd 3.4, which has no header.

        Raises: MalformedError when the id is missing, or differs from that of earlier responses.
        """
        header = response.get("header")
        if header is None and not response.keys() - {"alarms"}:
            return None
        found = header.get("cluster_id") if isinstance(header, dict) else None
        if not isinstance(found, str) or not _CLUSTER_ID.fullmatch(found):
            raise MalformedError("no header")
        expected = self._cluster_id
        if expected is not None and found != expected:
            raise MalformedError(f"{endpoint} is of cluster {found}, the others are of {expected}")
        return found

    def _forget_stream(self, stream: JsonStream) -> None:
        with self._lock:
            self._streams.discard(stream)

    def _record_success(self, endpoint: Endpoint) -> None:
        if self.ring.succeeded(endpoint):
            _logger.info("etcd endpoint %s answers again", endpoint)

    def _check_open(self, what: str, key: str | None) -> None:
        if self.is_closed:
            raise CoordinationError(f"{what}: this client is closed", key=key)


def _encode(body: JsonObject) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode("ascii")
