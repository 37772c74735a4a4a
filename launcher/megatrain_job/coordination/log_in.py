"""The token of a client whose user has a password: fetched by one thread at a time, and again when etcd refuses it."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from megatrain_job.coordination.errors import AttemptError
from megatrain_job.coordination.gateway_response import GatewayError, JsonObject
from megatrain_job.coordination.settings import Credentials, Endpoint
from megatrain_job.coordination.transport import Deadline

Exchange = Callable[[Endpoint, str, JsonObject, str | None, Deadline], JsonObject]
"""Sends one request (endpoint, path, body, token, deadline) and returns its response."""


class RecordFailure(Protocol):
    """Puts an endpoint behind the others."""

    def __call__(self, endpoint: Endpoint, reason: str, *, is_alive: bool = False) -> None: ...


_AUTHENTICATE = "/v3/auth/authenticate"
_TOKEN = re.compile(r"[!-~]{1,16384}")
_MAX_PAUSE_S = 60.0
"""The longest pause. Ten thousand clients that log in once a minute cost etcd 14 cores at its default --bcrypt-cost of
10 (82 ms for each log-in, measured), and one core at 4.
"""


class LogIn:
    """Fetches and keeps the token of one client. Safe to use from many threads.

    etcd processes a log-in even if its client no longer waits, and each log-in costs a bcrypt hash. After a restart of
    etcd all hosts of a job log in at once. If each repeated its log-in at once after a timeout, the queue would never
    become short enough for an answer in time. So an endpoint that did not answer a log-in in time is asked again after
    a pause that doubles with each failure; other endpoints are asked at once.
    """

    def __init__(
        self,
        credentials: Credentials | None,
        exchange: Exchange,
        record_failure: RecordFailure,
        *,
        slow_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """slow_after_s: after a log-in that timed out in fewer seconds, the endpoint does not count as slow."""
        self._slow_after_s = slow_after_s
        self._clock = clock
        self._credentials = credentials
        self._exchange = exchange
        self._record_failure = record_failure
        self._token: str | None = None
        self._token_lock = threading.Lock()
        self._fetch_lock = threading.Lock()
        self._pauses: dict[Endpoint, tuple[float, float]] = {}
        """The last pause, and the time of the next log-in, of each endpoint that did not answer in time."""

    def token(self, endpoint: Endpoint, what: str, deadline: Deadline) -> str | None:
        """Return the token, fetched from `endpoint` if there is none yet; None for a client without a user.

        Raises: AttemptError when the endpoint sends no token before the deadline; the typed errors of etcd's responses.
        """
        credentials = self._credentials
        if credentials is None:
            return None
        token = self._token
        if token is not None:
            return token
        with self._fetching(deadline):
            # read once: another thread may drop it at any moment
            token = self._token
            if token is None:
                token = self._token = self._fetch(endpoint, credentials, what, deadline)
            return token

    def drop(self) -> None:
        """Drop the token, because etcd refused it: the next call fetches a new one."""
        with self._token_lock:
            self._token = None

    def drop_refused(self, token: str | None, error: GatewayError) -> bool:
        """Drop a token that etcd no longer accepts; return whether a new token may help."""
        if token is None or not error.wants_new_token:
            return False
        with self._token_lock:
            if self._token == token:  # another thread may have a new one already
                self._token = None
        return True

    def _fetch(self, endpoint: Endpoint, credentials: Credentials, what: str, deadline: Deadline) -> str:
        last_pause_s, next_at = self._pauses.get(endpoint, (0.0, 0.0))
        left_s = next_at - self._clock()
        if left_s > 0:
            reason = f"no answer in time to the last log-in; the next is in {left_s:.1f} s"
            self._record_failure(endpoint, reason, is_alive=True)
            raise AttemptError(reason, may_have_applied=False)
        body = {"name": credentials.user, "password": credentials.password}
        asked_at = self._clock()
        try:
            response = self._exchange(endpoint, _AUTHENTICATE, body, None, deadline)
        except GatewayError as error:
            if error.is_passing:
                self._record_failure(endpoint, error.message, is_alive=True)
                raise AttemptError(error.message, may_have_applied=False) from error
            raise error.typed(f"{what}: as user {credentials.user!r}", str(endpoint), None) from error
        except AttemptError as error:
            waited_s = self._clock() - asked_at
            if error.may_have_applied and isinstance(error.__cause__, TimeoutError) and waited_s >= self._slow_after_s:
                self._pause(endpoint, last_pause_s, waited_s)
            # the call that needs the token was not sent, so it cannot have been applied
            raise AttemptError(str(error), may_have_applied=False) from error
        self._pauses.clear()  # etcd answers log-ins again: earlier timeouts no longer count
        token = response.get("token")
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            self._record_failure(endpoint, "no token in the answer")
            raise AttemptError("no token in the answer", may_have_applied=False)
        return token

    def _pause(self, endpoint: Endpoint, last_pause_s: float, waited_s: float) -> None:
        pause_s = min(max(2 * last_pause_s, waited_s), _MAX_PAUSE_S)
        self._pauses[endpoint] = (pause_s, self._clock() + pause_s * random.uniform(0.5, 1.0))

    @contextmanager
    def _fetching(self, deadline: Deadline) -> Iterator[None]:
        """Let one thread at a time fetch a token. A thread waits for another one only until its own deadline."""
        if not self._fetch_lock.acquire(timeout=max(deadline.left_s, 0.0)):
            raise AttemptError("no answer in time to a request for a token", may_have_applied=False)
        try:
            yield
        finally:
            self._fetch_lock.release()
