"""One agent's membership in the job: its keys with a lease, and its view of the other agents.

The keys are written again if etcd lost the lease. A failure of etcd never stops workers: an agent that waits for a
round gets the error, but a running round continues.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from megatrain.contracts.errors import ConfigError, CoordinationError
from megatrain.contracts.records.host_records import HostPhase, HostRecord, HostStatus
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.errors import LeaseLostError
from megatrain_job.coordination.lease_keeper import LeaseKeeper, LeaseState
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_job.coordination.watch import Watch
from megatrain_job.coordination.watch_event import Snapshot, WatchEvent
from megatrain_job.coordination.wire import KeyRange, Operation, Put
from megatrain_launcher.hosts.address import own_address
from megatrain_launcher.rendezvous.settings import RendezvousSettings
from megatrain_launcher.rendezvous.view import View

_logger = logging.getLogger(__name__)
_NNODES_LABEL = "nnodes"
_POLL_S = 0.1
_RETRY_S = 0.5
_END_S = 2.0
_MAX_TRIES = 5
_GONE = (LeaseState.LOST, LeaseState.CLOSED)


class RendezvousMembership:
    """Registered from the first `ask` until `leave`; follows the job from `open` until `close`. Thread-safe."""

    def __init__(self, client: EtcdClient, settings: RendezvousSettings, me: HostRecord) -> None:
        self.client = client
        self.settings = settings
        self.lost_s = -math.inf
        """The time at which a lost lease was last replaced, by the monotonic clock."""
        self._record = me
        self._status = HostStatus(me.host, me.session, HostPhase.PARKED)
        self._view = View()
        self._error: CoordinationError | None = None
        self._changed = threading.Condition(threading.RLock())
        self._writing = threading.Lock()
        self._keeper: LeaseKeeper | None = None
        self._is_over = threading.Event()
        self._is_closed = threading.Event()
        self._thread: RestartingThread | None = None

    @property
    def host(self) -> str:
        return self._record.host

    @property
    def session(self) -> str:
        return self._record.session

    @property
    def keys(self) -> JobKeys:
        return self.settings.keys

    @property
    def view(self) -> View:
        with self._changed:
            return self._view

    @property
    def keeper(self) -> LeaseKeeper | None:
        """The keeper of the current lease, replaced after a loss; None before registration."""
        return self._keeper

    @property
    def is_over(self) -> bool:
        """Whether this agent has left."""
        return self._is_over.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether the view currently cannot be updated."""
        return self._error is not None

    def open(self) -> None:
        """Read the state of the job and start to follow it. Raises: CoordinationError."""
        self.refresh()
        self._thread = RestartingThread("rendezvous follower", self._follow, self._is_closed)

    def ask(self, store_port: int, after: int) -> None:
        """Register if necessary, and request a round newer than `after`; `store_port`: the port of the store that
        this agent offers for the round.

        Raises: CoordinationError; ConfigError when an earlier host was started with another --nnodes.
        """
        is_first = self._keeper is None
        with self._writing:
            self._record = replace(self._record, store_port=store_port)
            self._status = replace(self._status, phase=HostPhase.PARKED, round=after)
        self._publish()
        if is_first:
            self.refresh()
            self._check_others()

    def arrive(self, number: int) -> None:
        """Report that this host takes part in a round and has reached its store. Raises: CoordinationError."""
        with self._writing:
            self._status = replace(self._status, phase=HostPhase.RUNNING, round=number)
        self._publish()

    def wait(self, is_met: Callable[[View], bool], timeout_s: float) -> View:
        """Return the view as soon as it meets a condition, or at the timeout.

        Raises: CoordinationError when it cannot be updated.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or is_met(self._view), timeout_s)
            if self._error is not None:
                raise self._error
            return self._view

    def wait_beyond(self, revision: int, timeout_s: float) -> View:
        """Return the view as soon as it is newer than a revision, or at the timeout. Raises: as `wait`."""
        return self.wait(lambda view: view.revision > revision, timeout_s)

    def refresh(self) -> None:
        """Read the job's keys and update the view. Raises: CoordinationError."""
        response = self.client.read_all(KeyRange.prefix(self.keys.prefix))
        with self._changed:
            if response.revision > self._view.revision:  # the watch may be faster
                self._take(Snapshot(response.revision, response.items, "read"))

    def leave(self) -> None:
        """Remove the keys; if etcd cannot be reached, they expire after a TTL. The view is still updated."""
        self._is_over.set()
        with self._writing:
            if self._keeper is not None:
                self._keeper.close()

    def close(self) -> None:
        """Leave, and stop the thread."""
        self.leave()
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join(_END_S)  # it may wait for an unavailable etcd

    def _publish(self) -> None:
        """Write both keys, with a new lease if there is none or it was lost."""
        for number in range(_MAX_TRIES):
            with self._writing:
                if self.is_over:
                    return
                try:
                    self._write()
                    return
                except LeaseLostError:
                    if number == _MAX_TRIES - 1:
                        raise

    def _write(self) -> None:
        keeper = self._keeper
        if keeper is None or keeper.state in _GONE:
            new = LeaseKeeper(self.client, ttl_s=math.ceil(self.settings.ttl_s), period_s=self.settings.renew_s)
            if keeper is not None:
                keeper.close(is_revoked=False)
                self.lost_s = time.monotonic()
            keeper = self._keeper = new
        puts: list[Operation] = [
            Put(self.keys.host(self.host), encode(self._record), keeper.lease_id),
            Put(self.keys.status(self.host), encode(self._status), keeper.lease_id),
        ]
        try:
            self.client.txn([], puts, is_repeatable=True)
        except LeaseLostError:
            keeper.close(is_revoked=False)  # the keeper may not have detected the loss yet
            raise

    def _check_others(self) -> None:
        """Raises: ConfigError if a host that registered earlier has another --nnodes."""
        own, view = self._record.labels[_NNODES_LABEL], self.view
        for host, record in sorted(view.records.items()):
            other = record.labels.get(_NNODES_LABEL, own)
            # by revisions: clocks of hosts differ
            if other != own and view.since[host] < view.since.get(self.host, view.revision):
                problem = f"--nnodes={own} on this host, {other} on {host} (key {self.keys.host(host)!r})"
                hint = f"start all agents of --rdzv-id={self.settings.run_id} with the same --nnodes, or use another id"
                raise ConfigError([f"{problem}; {hint}"])

    def _follow(self) -> None:
        with Watch(self.client, KeyRange.prefix(self.keys.prefix), start_revision=self.view.revision + 1) as watch:
            while not self._is_closed.is_set():
                try:
                    event = watch.next(_POLL_S)
                except CoordinationError as error:  # for example, this user has no permission to read
                    self._fail(error)
                    raise
                if event is not None:
                    self._take(event)
                elif watch.confirmed_at is not None:
                    self._error = None
                try:
                    self._renew_registration()
                except CoordinationError as error:
                    _logger.warning("rendezvous: %s; trying again", error)
                    self._is_closed.wait(_RETRY_S)

    def _renew_registration(self) -> None:
        """Register again when etcd lost the lease."""
        keeper = self._keeper
        if keeper is not None and keeper.state in _GONE and not self.is_over:
            self._publish()
            _logger.warning("rendezvous: %s is registered again", self.host)

    def _take(self, event: WatchEvent) -> None:
        with self._changed:
            self._error = None
            known, self._view = self._view.damaged, self._view.after(event, self.keys)
            fresh = [why for key, why in self._view.damaged.items() if known.get(key) != why]
            self._changed.notify_all()
        for why in fresh:
            _logger.error("rendezvous: a key is skipped: %s", why)

    def _fail(self, error: CoordinationError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()


def own_record(settings: RendezvousSettings) -> HostRecord:
    """Return the record of a new agent on this machine."""
    session = secrets.token_hex(8)
    return HostRecord(
        # a machine may have several agents
        host=f"{socket.gethostname()}-{os.getpid()}-{session[:4]}",
        session=session,
        pid=os.getpid(),
        address=settings.address or own_address(settings.etcd.endpoints),
        store_port=0,
        liveness_port=0,
        num_workers=1,
        config_hash="",
        version=importlib.metadata.version("megatrain"),
        hardware=platform.machine(),
        joined_unix_s=time.time(),
        is_fit=True,
        labels={_NNODES_LABEL: settings.host_range},
    )
