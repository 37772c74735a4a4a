"""A dedicated driver: a candidate without a training host, for a machine that outlives the training hosts.

The job's record contains all settings of the job: this driver reads no configuration file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from megatrain.config.config import Config
from megatrain.config.serialize import config_of_values
from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import JobEnd, JobRecord
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.lease_keeper import LeaseKeeper, LeaseState
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.executor.driver_thread import new_driver
from megatrain_launcher.executor.job_programs import ProgramSettings
from megatrain_launcher.executor.program_runner import start_program_runner
from megatrain_launcher.hosts.adapter import HostAdapter
from megatrain_launcher.hosts.local import host_name
from megatrain_launcher.launch.cordons import CordonWatch
from megatrain_launcher.launch.plan import count_hosts

_POLL_S = 0.5


class RenewedLease(Closable):
    """The lease of a candidate. A lost lease is replaced by a new one; `close` revokes the lease."""

    def __init__(self, client: EtcdClient, ttl_s: int, period_s: float) -> None:
        self._client = client
        self._ttl_s = ttl_s
        self._period_s = period_s
        self._keeper = self._take()

    def close(self) -> None:
        self._keeper.close()

    def __call__(self) -> LeaseKeeper:
        """Return the current keeper. Raises: CoordinationError when a new lease is needed and not granted."""
        if self._keeper.state is LeaseState.LOST:
            self._keeper.close()
            self._keeper = self._take()
        return self._keeper

    def _take(self) -> LeaseKeeper:
        return LeaseKeeper(self._client, ttl_s=self._ttl_s, period_s=self._period_s)


def run_dedicated_driver(
    client: EtcdClient, keys: JobKeys, stop: threading.Event, report: Callable[[str], None], platform: HostAdapter
) -> int | None:
    """Take part in the driver election until the job ends, and return the job's exit code; None if `stop` was set
    before.

    `platform` gets the cordons of the hosts that this driver evicts.

    Raises: ConfigError when the record is unusable; CoordinationError when etcd cannot be reached at the beginning.
    """
    record = _wait_for_record(client, keys, stop, report)
    if record is None:
        return None
    config = config_of_values(record.config, record.job)
    name = f"driver-{host_name()}-{os.getpid()}"
    run = RunDirectory(Path(record.run_directory))
    recovery = config.recovery
    is_over = threading.Event()
    with ExitStack() as closing:
        keeper = closing.enter_context(RenewedLease(client, recovery.lease_ttl_s, recovery.lease_renew_s))
        if platform.name != "local":
            closing.enter_context(CordonWatch(client, keys, name, platform))
        leading, is_run_here = threading.Event(), run.root.is_dir()
        driver = new_driver(
            config, run if is_run_here else None, client, keys, keeper, name, policy_of(record, config), leading
        )
        programs = ProgramSettings(config, run.root, client.settings, os.environ)
        diagnosis = start_program_runner(programs, name, client, record, leading) if is_run_here else None
        if diagnosis is not None:
            closing.callback(diagnosis.close)
        elif not config.diagnostics.daemon_host:
            missing = f"{run.root} is not on this machine: while this machine drives, neither daemon nor page runs"
            report(f"{missing}; name a host for them with diagnostics.daemon_host")
        thread = RestartingThread("driver", lambda: driver.run(is_over), is_over)
        report(f"{name} is a candidate for the driver of job {keys.job}")
        try:
            return _wait_for_end(client, keys, stop, thread)
        finally:
            is_over.set()
            thread.join()


def policy_of(record: JobRecord, config: Config) -> Policy:
    """Return the rules by which every driver of this job decides. Raises: ConfigError."""
    feasible, _ = count_hosts(config, {}, record.min_hosts, record.max_hosts, record.num_workers)
    return Policy.of(
        config,
        min_hosts=record.min_hosts,
        max_hosts=record.max_hosts,
        num_workers=record.num_workers,
        feasible_counts=feasible,
    )


def _wait_for_record(
    client: EtcdClient, keys: JobKeys, stop: threading.Event, report: Callable[[str], None]
) -> JobRecord | None:
    is_announced = False
    while not stop.is_set():
        item = client.get(keys.record)
        if item is not None and client.get(keys.end) is None:
            return decode(JobRecord, item.value, keys.record)
        if not is_announced:
            report(f"waiting for the first host of job {keys.job}")
            is_announced = True
        stop.wait(_POLL_S)
    return None


def _wait_for_end(client: EtcdClient, keys: JobKeys, stop: threading.Event, driver: RestartingThread) -> int | None:
    while not stop.wait(_POLL_S) and driver.is_alive:
        try:
            item = client.get(keys.end)
        except CoordinationError:
            continue  # the driver reports the outage
        if item is not None:
            return decode(JobEnd, item.value, keys.end).exit_code
    return None
