"""This host's membership in the job: its lease, its record, and its session.

After a lost lease, the host takes a new lease and keeps its session, until the job's rounds show that the job continued
without it.
If another executor has the host's key and is proven dead (it ran on this machine, and its port refuses connections or
sends another session), its record is replaced at once. If it answers, this executor leaves. If it does not answer, an
executor that registers for the first time waits until the other lease has expired; one that registers again leaves.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto

from megatrain.contracts.errors import ConfigError, CoordinationError
from megatrain.contracts.records.host_records import HostRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode, encode
from megatrain.fencing.fence import LeaseView
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.errors import LeaseLostError
from megatrain_job.coordination.lease_keeper import LeaseKeeper, LeaseState
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_job.coordination.wire import Compare, KeyRange, KeyValue, Put, Range
from megatrain_launcher.liveness import Liveness, ask

_logger = logging.getLogger(__name__)
_POLL_S = 0.25
_AGAIN_S = 0.5
"""The pause between attempts to register again."""


class FitnessCheck(Enum):
    """The checks of this host's fitness. The host is fit if all of them pass."""

    HEALTH = auto()
    ORDERS = auto()


class ReplacedError(CoordinationError):
    """Another executor has registered under this host's name, so this executor must leave."""


class Membership:
    """Keeps this host registered from `register` to `close`: renews a lease of `ttl_s` every `renew_s`. Thread-safe.

    `on_change`: called when the lease or the registration changed; must be quick and must not raise.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: JobKeys,
        *,
        ttl_s: int,
        renew_s: float,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._client, self._keys = client, keys
        self._ttl_s, self._renew_s = ttl_s, renew_s
        self._on_change = on_change
        self._lock = threading.RLock()
        self._record: HostRecord | None = None
        self._unfit_reasons: dict[FitnessCheck, str] = {}
        self._keeper: LeaseKeeper | None = None
        self._is_registered = False
        self._keeper_of_key: LeaseKeeper | None = None
        """The keeper of the lease under which the host's key was written; None before the first write."""
        self._gone_at: float | None = None
        """The time at which that lease was lost or had expired; None while the lease appears to be valid."""
        self._problem = self._replaced = ""
        self._wake, self._closed = threading.Event(), threading.Event()
        self._thread: RestartingThread | None = None
        self._job_created = 0
        """The revision at which the job's record was created; 0 without a record."""

    def register(self, record: HostRecord) -> None:
        """Take a lease, write the host's key, and keep both until `close`.

        Raises: ConfigError when another executor has the host's name; CoordinationError.
        """
        deadline = time.monotonic() + self._ttl_s + 2.0
        self._keeper = self._new_keeper()
        self._record = record
        self._unfit_reasons[FitnessCheck.HEALTH] = "" if record.is_fit else record.unfit_reason
        try:
            item = self._client.get(self._keys.record)
            self._job_created = 0 if item is None else item.create_revision
            while (holder := self._claim(record)) is not None:
                self._check_gone(holder, deadline)
                time.sleep(_POLL_S)
        except BaseException:
            self._keeper.close()
            raise
        self._is_registered, self._keeper_of_key = True, self._keeper
        self._thread = RestartingThread("membership", self._run, self._closed)

    @property
    def record(self) -> HostRecord:
        """This host's record as it is, or should be, registered."""
        with self._lock:
            assert self._record is not None
            return self._record

    @property
    def session(self) -> str:
        return self.record.session

    @property
    def is_registered(self) -> bool:
        """Whether the host's key should hold the current record, under a lease that is not known to be lost."""
        with self._lock:
            return self._is_registered and self.keeper.state is not LeaseState.LOST

    @property
    def keeper(self) -> LeaseKeeper:
        """The keeper of the current lease. A lost lease is replaced by a lease with another keeper."""
        with self._lock:
            assert self._keeper is not None
            return self._keeper

    @property
    def replaced(self) -> str:
        """The reason why this executor must leave, because another executor has its host's name; empty otherwise."""
        return self._replaced

    @property
    def problem(self) -> str:
        """The reason why the last attempt to register this host again failed; empty if it succeeded."""
        return self._problem

    def lease(self) -> LeaseView:
        """Return the validity of the lease under which the host's key was last written, by this host's clock."""
        with self._lock:
            now, keeper = time.monotonic(), self._keeper_of_key
            if keeper is None:
                return LeaseView(0.0)
            if keeper is self._keeper and keeper.state is not LeaseState.LOST:
                self._gone_at = None
                return LeaseView(-keeper.valid_s)  # negative: still valid for that many seconds
            if self._gone_at is None:
                self._gone_at = now + min(0.0, keeper.valid_s)
            return LeaseView(now - self._gone_at)

    def begin_session(self, session: str) -> None:
        """Set a new session of this host, and register with it."""
        with self._lock:
            self._record = replace(self.record, session=session, joined_unix_s=time.time())
            self._is_registered = False
        self._notify_change()

    def set_unfit_reason(self, check: FitnessCheck, reason: str) -> bool:
        """Set the reason why a check finds this host unfit; empty: fit. Return whether the reason changed."""
        with self._lock:
            if self.unfit_reason(check) == reason:
                return False
            self._unfit_reasons[check] = reason
            reasons = "; ".join(filter(None, map(self.unfit_reason, FitnessCheck)))
            self._record = replace(self.record, is_fit=not reasons, unfit_reason=reasons)
            self._is_registered = False
        self._notify_change()
        return True

    def unfit_reason(self, check: FitnessCheck) -> str:
        """Return the reason why a check finds this host unfit; empty if it does not."""
        with self._lock:
            return self._unfit_reasons.get(check, "")

    def close(self) -> None:
        """Stop, and revoke the lease, which removes the host's key."""
        self._closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        if self._keeper is not None:
            self._keeper.close()

    def _notify_change(self) -> None:
        self._wake.set()
        self._on_change()

    def _new_keeper(self) -> LeaseKeeper:
        return LeaseKeeper(
            self._client, ttl_s=self._ttl_s, period_s=self._renew_s, on_change=lambda state: self._notify_change()
        )

    def _run(self) -> None:
        """Register again whenever necessary, and retry until that succeeds."""
        pause_s: float | None = None
        while not self._closed.is_set():
            self._wake.wait(pause_s)
            self._wake.clear()
            if self._closed.is_set() or self._client.gateway.is_closed:
                return
            try:
                self._renew_registration()
                pause_s, self._problem = None, ""
            except ReplacedError as error:
                self._replaced = str(error)
                self._on_change()
                return
            except CoordinationError as error:
                self._problem = f"not registered: {error}"
                pause_s = _AGAIN_S

    def _renew_registration(self) -> None:
        with self._lock:
            keeper, is_registered, record = self.keeper, self._is_registered, self.record
        if keeper.state is LeaseState.LOST:
            fresh = self._new_keeper()
            with self._lock:
                self._keeper, self._is_registered = fresh, False
            keeper.close()
        elif is_registered:
            return
        if (holder := self._claim(record)) is not None:
            key = self._keys.host(record.host)
            found = decode(HostRecord, holder.value, key)
            if (found.pid, found.address, found.liveness_port) == (record.pid, record.address, record.liveness_port):
                # this executor's own key, under a lease that etcd is about to end
                raise CoordinationError("this host's key still exists under the lost lease", key=key)
            raise ReplacedError(
                f"host {record.host}: another executor (process {found.pid} at {found.address}) registered under this "
                "name while this executor was not registered; this executor leaves the job",
                key=key,
            )
        with self._lock:
            # the record may have changed during the write; then write it again
            self._is_registered = self._record == record
            self._keeper_of_key = self._keeper
            if not self._is_registered:
                self._wake.set()
        _logger.info("host %s is registered with session %s", record.host, record.session)
        self._on_change()

    def _claim(self, record: HostRecord) -> KeyValue | None:
        """Write the host's key if it is free, has the current lease, or belongs to an executor that is proven dead.
        Return None after the write, else the key that prevents it. Raises: CoordinationError.
        """
        key, keeper = self._keys.host(record.host), self.keeper
        put = Put(key, encode(record), keeper.lease_id)
        conditions = [Compare.is_absent(key)]
        if self._job_created:
            conditions.append(Compare.create_revision(self._keys.record, self._job_created))
        ranges = [Range(KeyRange.key(key)), Range(KeyRange.key(self._keys.record))]
        try:
            response = self._client.txn(conditions, [put], ranges, is_repeatable=True)
            if response.succeeded:
                return None
            self._check_job(response.range_response(1).items)
            item = response.range_response(0).first()
            if item.lease_id == keeper.lease_id or _is_dead_here(decode(HostRecord, item.value, key), record):
                same = Compare.mod_revision(key, item.mod_revision)
                return None if self._client.txn([same], [put], is_repeatable=True).succeeded else item
        except LeaseLostError as error:
            raise CoordinationError(f"the new lease was lost at once: {error}", key=key) from error
        return item

    def _check_job(self, records: Sequence[KeyValue]) -> None:
        """Raises: CoordinationError if etcd has lost the job since this host joined it: new rounds would begin at 1."""
        found = records[0].create_revision if records else 0
        if self._job_created and found != self._job_created:
            raise CoordinationError(
                f"etcd no longer has the job {self._keys.job!r} that this host joined: etcd was emptied, or restored "
                "to an older state; restore its data, or stop the job, which saves a checkpoint, and launch it again",
                key=self._keys.record,
            )

    def _check_gone(self, holder: KeyValue, deadline: float) -> None:
        """Raises: ConfigError if the executor that has this host's name lives, or has not left by the deadline."""
        key = self._keys.host(self.record.host)
        found = decode(HostRecord, holder.value, key)
        is_alive = ask(found.address, found.liveness_port, found.session)[0] is Liveness.ALIVE
        if is_alive or time.monotonic() > deadline:
            problem = (
                f"host {found.host!r}: job {self._keys.job!r} has a live executor of this name (process {found.pid} at "
                f"{found.address}, key {key}); this is a second launch of a running job, or two hosts share one name: "
                "stop the other executor, or give this host another --host-id"
            )
            raise ConfigError([problem])


def _is_dead_here(found: HostRecord, record: HostRecord) -> bool:
    """Return whether an executor of this machine is proven dead: its port refuses, or sends another session."""
    if found.address != record.address and found.address not in _own_addresses():
        return False
    return ask(found.address, found.liveness_port, found.session)[0] is Liveness.DEAD


def _own_addresses() -> Sequence[str]:
    found = ["127.0.0.1", "localhost", "::1"]
    with suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    return found
