"""Runs this host's driver candidate in a separate thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from megatrain.config.config import Config
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.lease_keeper import LeaseKeeper
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_launcher.driver.driver import Driver, SteadyClock
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.resume_point_watch import local_checkpoints
from megatrain_launcher.driver.run_watch import watched_directories
from megatrain_launcher.executor.settings import ExecutorSettings
from megatrain_launcher.notify.notifier import notifier_of

RunDriver = Callable[[threading.Event], None]
"""A function that takes part in the driver election, and drives while elected, until the event is set."""


def driver_of(
    settings: ExecutorSettings,
    client: EtcdClient,
    keys: JobKeys,
    keeper: Callable[[], LeaseKeeper],
    leading: threading.Event,
    is_suspected: Callable[[], bool],
) -> RunDriver:
    """Return the function that runs this host's driver. `keeper` returns the keeper of the host's current lease.

    `leading` is set while the driver is elected. `is_suspected`: whether the elected driver may be dead (see Driver).
    """
    policy = Policy.of(
        settings.config,
        min_hosts=settings.min_hosts,
        max_hosts=settings.max_hosts,
        num_workers=settings.num_workers,
        feasible_counts=settings.feasible_hosts,
    )
    return new_driver(
        settings.config, settings.run_directory, client, keys, keeper, settings.host, policy, leading, is_suspected
    ).run


def new_driver(
    config: Config,
    run: RunDirectory | None,
    client: EtcdClient,
    keys: JobKeys,
    keeper: Callable[[], LeaseKeeper],
    name: str,
    policy: Policy,
    leading: threading.Event,
    is_suspected: Callable[[], bool] = lambda: False,
) -> Driver:
    """Return a driver of a job with this configuration. `run`: the run directory; None: this machine cannot access it.

    `name`: the name with which the driver campaigns; the other parameters are those of Driver.
    """
    clock = SteadyClock()
    return Driver(
        client, keys, keeper, name, policy, leading=leading, clock=clock,
        incidents_directory=None if run is None else run.incidents,
        watched={} if run is None else watched_directories(config, run),
        checkpoints=None if run is None else local_checkpoints(config, run),
        is_suspected=is_suspected,
        make_notifier=notifier_of(config, client, keys, clock),
    )  # fmt: skip


class DriverThread:
    """Runs the driver of this host until `close`."""

    def __init__(self, run_driver: RunDriver) -> None:
        self._stop = threading.Event()
        self._thread = RestartingThread("driver", lambda: run_driver(self._stop), self._stop)

    @property
    def problem(self) -> str:
        """The last error of this host's driver; empty if there was none, or if it was overcome."""
        return self._thread.problem

    def close(self) -> None:
        """Make the driver step down, and wait until it has."""
        self._stop.set()
        self._thread.join()
