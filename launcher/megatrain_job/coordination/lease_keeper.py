"""Keeps a lease alive from a separate thread: the heartbeat of a host.

States until `close`, after which the state is CLOSED unless the lease is lost. HELD: renewed within its TTL. DOUBTFUL:
not renewed for a TTL, because etcd cannot be reached or refuses this user; the lease may still exist, because a new
etcd leader extends all leases. LOST: etcd has answered that the lease does not exist. DOUBTFUL changes to HELD or LOST
with the next answer about the lease. LOST is final: to continue, a program must first find out whether it was replaced,
and then take a new lease.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum

from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import CoordinationError, CoordinationRefusedError
from megatrain_job.coordination.client import EtcdClient, Lease
from megatrain_job.coordination.errors import LeaseLostError
from megatrain_job.coordination.restarting_thread import RestartingThread

_logger = logging.getLogger(__name__)
_JITTER = 0.2
_RETRY_PART = 0.2
"""After a renewal that failed and was not refused, the pause is this fraction of the period."""


class LeaseState(Enum):
    HELD = "held"
    DOUBTFUL = "doubtful"
    LOST = "lost"
    CLOSED = "closed"


class LeaseKeeper(Closable):
    """Takes a lease at once and renews it until `close`. Raises: CoordinationError when none is granted.

    `on_change` is called in the keeper's thread: it must be quick and must not raise.
    """

    def __init__(
        self,
        client: EtcdClient,
        *,
        ttl_s: int = 10,
        period_s: float = 3.0,
        on_change: Callable[[LeaseState], None] | None = None,
    ) -> None:
        self._client = client
        self._on_change = on_change
        asked_at = time.monotonic()
        self.lease: Lease = client.grant_lease(ttl_s)
        self._period_s = min(period_s, self.lease.ttl_s / 3)
        self._lock = threading.Lock()
        self._valid_until = asked_at + self.lease.ttl_s
        self._reported_state = LeaseState.HELD
        self.lost_because = ""
        """Why the lease is lost; empty if it is not."""
        self._lost = threading.Event()
        self._closed = threading.Event()
        self._thread = RestartingThread(f"etcd lease {self.lease.lease_id:x}", self._run, self._closed)

    @property
    def lease_id(self) -> int:
        return self.lease.lease_id

    @property
    def state(self) -> LeaseState:
        """The current state, by this host's clock: never HELD longer than etcd promised."""
        if self._lost.is_set():
            return LeaseState.LOST
        if self._closed.is_set():
            return LeaseState.CLOSED
        return LeaseState.HELD if self.valid_s > 0 else LeaseState.DOUBTFUL

    @property
    def valid_s(self) -> float:
        """For how many seconds etcd still guarantees the lease, counted from the start of the last renewal."""
        with self._lock:
            return self._valid_until - time.monotonic()

    def wait_until_lost(self, timeout_s: float) -> bool:
        """Wait until the lease is lost, for at most `timeout_s`; return whether it is."""
        return self._lost.wait(timeout_s)

    def close(self, *, is_revoked: bool = True) -> None:
        """End the thread; with `is_revoked`, revoke the lease, so that its keys are deleted now, not a TTL later."""
        was_closed = self._closed.is_set()
        self._closed.set()
        if not self._thread.is_current:
            self._thread.join()
        if is_revoked and not was_closed and not self._lost.is_set():
            # the lease expires by itself if etcd cannot be reached
            with suppress(CoordinationError):
                self._client.revoke_lease(self.lease_id, deadline_s=self._period_s)

    def _run(self) -> None:
        pause_s = self._period_s
        while not self._closed.wait(min(pause_s * random.uniform(1 - _JITTER, 1 + _JITTER), self._until_doubt_s())):
            if self._client.gateway.is_closed:
                return
            pause_s = self._renew()
            if self._lost.is_set():
                return

    def _renew(self) -> float:
        """Renew once; return the time until the next try."""
        asked_at = time.monotonic()
        try:
            ttl_s = self._client.renew_lease(self.lease_id, deadline_s=self._period_s)
        except LeaseLostError as error:
            self.lost_because = str(error)
            self._lost.set()
            self._report_change(LeaseState.LOST, str(error))
            return 0.0
        except CoordinationRefusedError as error:
            # permission may be restored: only an answer of etcd about the lease shows that it is lost
            self._report_change(self.state, str(error))
            return self._period_s
        except CoordinationError as error:
            self._report_change(self.state, str(error))
            return self._period_s * _RETRY_PART
        with self._lock:
            self._valid_until = asked_at + min(ttl_s, self.lease.ttl_s)
        self._report_change(self.state, "renewed again")
        return self._period_s

    def _until_doubt_s(self) -> float:
        """Return the longest time until the next check, so that DOUBTFUL is reported when it begins."""
        valid_s = self.valid_s
        return valid_s if valid_s > 0 else self._period_s

    def _report_change(self, state: LeaseState, reason: str) -> None:
        if state is self._reported_state or state is LeaseState.CLOSED:
            return
        self._reported_state = state
        _logger.warning("etcd lease %x is %s: %s", self.lease_id, state.value, reason)
        if self._on_change is not None:
            self._on_change(state)
