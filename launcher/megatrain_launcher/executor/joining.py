"""Lets a host join its job: claims the job's name, creates the local parts, and registers the host.

A driver sees the host only once it is registered, with its complete record.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megatrain import __version__
from megatrain.contracts.records.host_records import HostRecord
from megatrain.contracts.records.job_keys import JobKeys, key_number
from megatrain.contracts.records.rounds import JobRecord, LostLaunch
from megatrain.run_files.run_directory import safe_name
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.wire import KeyRange
from megatrain_launcher.executor.crash_evidence import BoxPaths, CrashEvidence
from megatrain_launcher.executor.host_status_builder import HostStatusBuilder
from megatrain_launcher.executor.job_record import claim_job, record_of
from megatrain_launcher.executor.lost_launch import find_lost_launch
from megatrain_launcher.executor.membership import Membership
from megatrain_launcher.executor.order_state import OrderState
from megatrain_launcher.executor.program_runner import leave_mark
from megatrain_launcher.executor.settings import ExecutorSettings, new_session
from megatrain_launcher.liveness import LivenessPort, orders_lost_after_s
from megatrain_launcher.logs.worker_logs import WorkerLogs
from megatrain_launcher.standby.client import StandbyClient
from megatrain_launcher.store import listen_for_store
from megatrain_launcher.worker_environment import server_environment

_LEAVING_S = 5.0
"""The time, in addition to the lease's TTL, to wait until the hosts of an ended launch have left."""
_CHECKS_RUN = "its health checks are running"


@dataclass(slots=True)
class Wakers:
    """The parts to wake after a change. The list is filled once these parts exist, because they wake each other."""

    all: list[Callable[[], None]] = field(default_factory=list)

    def wake(self) -> None:
        for wake in self.all:
            wake()


@dataclass(frozen=True, slots=True)
class LocalParts:
    """The parts that this host creates before it registers."""

    wakers: Wakers
    state: HostStatusBuilder
    crash: CrashEvidence
    store_port: int
    environment: Mapping[str, str]
    standby: StandbyClient
    logs: WorkerLogs
    liveness: LivenessPort


@dataclass(frozen=True, slots=True)
class JoinedHost:
    """The parts of a host that has joined the job."""

    local: LocalParts
    keys: JobKeys
    record: JobRecord
    membership: Membership
    orders: OrderState
    seen_command: int


def join_job(settings: ExecutorSettings, client: EtcdClient, closing: ExitStack) -> JoinedHost:
    """Claim the job's name, create the local parts, and register the host. `closing`: closes the created parts.

    Raises: ConfigError or CoordinationError when this host cannot take part.
    """
    keys = JobKeys(settings.config.job.name)
    settings.run_directory.create()
    patience_s = settings.config.recovery.lease_ttl_s + _LEAVING_S
    record = claim_job(client, keys, record_of(settings), patience_s, partial(_find_lost_launch, settings))
    if record.first_host == settings.host:
        leave_mark(settings.run_directory, record)
    return _register(settings, client, record, _open_local(settings, closing), closing)


def _find_lost_launch(settings: ExecutorSettings, record: JobRecord) -> LostLaunch:
    boxes = settings.config.telemetry.black_box_directory
    return find_lost_launch(record, settings.run_directory, Path(boxes) if boxes else None, settings.host)


def _open_local(settings: ExecutorSettings, closing: ExitStack) -> LocalParts:
    wakers = Wakers()
    state = HostStatusBuilder(settings.host, wakers.wake)
    # these parts are closed in reverse order
    box_paths = _box_paths(settings)
    box_paths.make()
    crash = CrashEvidence(box_paths, settings.max_hosts * settings.num_workers)
    closing.callback(crash.close)
    closing.callback(crash.sweep)
    crash.sweep()
    store = closing.enter_context(listen_for_store(settings.address))
    environment = server_environment(settings.environment, settings.num_workers)
    standby = closing.enter_context(
        StandbyClient(preload=tuple(settings.preload), environment=environment, store=store)
    )
    logs = WorkerLogs(settings.logs / safe_name(settings.host), tee=settings.tee, on_alarm=state.set_alarm)
    closing.enter_context(logs)
    liveness = LivenessPort(new_session(), settings.address)
    closing.callback(liveness.close)
    return LocalParts(wakers, state, crash, store.getsockname()[1], environment, standby, logs, liveness)


def _register(
    settings: ExecutorSettings, client: EtcdClient, record: JobRecord, local: LocalParts, closing: ExitStack
) -> JoinedHost:
    recovery, session, keys = settings.config.recovery, local.liveness.session, JobKeys(record.job)
    membership = Membership(
        client, keys, ttl_s=recovery.lease_ttl_s, renew_s=recovery.lease_renew_s, on_change=local.wakers.wake
    )
    seen_command = _newest_command(client, keys)
    membership.register(_host_record(settings, local))
    closing.callback(membership.close)
    orders = OrderState(
        keys, settings.host, session, local.wakers.wake,
        max_unconfirmed_s=orders_lost_after_s(recovery.lease_ttl_s),
    )  # fmt: skip
    closing.callback(orders.close)
    return JoinedHost(local, keys, record, membership, orders, seen_command)


def _host_record(settings: ExecutorSettings, local: LocalParts) -> HostRecord:
    has_checks = settings.config.recovery.has_health_checks
    return HostRecord(
        host=settings.host,
        session=local.liveness.session,
        pid=os.getpid(),
        address=settings.address,
        store_port=local.store_port,
        liveness_port=local.liveness.port,
        num_workers=settings.num_workers,
        config_hash=settings.config_hash,
        version=__version__,
        hardware=settings.hardware,
        joined_unix_s=time.time(),
        is_fit=not has_checks,
        unfit_reason=_CHECKS_RUN if has_checks else "",
        is_driver_candidate=settings.is_driver_candidate,
        labels=dict(settings.labels),
    )


def _box_paths(settings: ExecutorSettings) -> BoxPaths:
    directory = settings.config.telemetry.black_box_directory
    return BoxPaths(Path(directory) if directory else None, settings.config.job.name, settings.run_directory)


def _newest_command(client: EtcdClient, keys: JobKeys) -> int:
    """Return the number of the newest command in etcd, which is older than this executor; 0 if there is none."""
    items = client.read_all(KeyRange.prefix(keys.directory("commands")), has_values=False).items
    names = [keys.parts(item.key.decode(errors="replace"))[-1] for item in items]
    return max((key_number(name) or 0 for name in names), default=0)
