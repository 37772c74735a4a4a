"""This host's candidate for the driver, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from megatrain.contracts.job_keys import JobKeys
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.lasting_thread import LastingThread
from megatrain.coordination.lease_keeper import LeaseKeeper
from megatrain_launcher.driver.checkpoint_watch import local_checkpoints
from megatrain_launcher.driver.driver import Driver, SteadyClock
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.run_watch import watched_directories
from megatrain_launcher.executor.settings import ExecutorSettings
from megatrain_launcher.notify.notifier import notifier_of

RunDriver = Callable[[threading.Event], None]
"""Campaigns and drives until the event is set."""


def driver_of(
    settings: ExecutorSettings,
    client: EtcdClient,
    keys: JobKeys,
    keeper: Callable[[], LeaseKeeper],
    leading: threading.Event,
) -> RunDriver:
    """Return what runs this host's driver, with whatever lease the host has at the moment.

    `leading` is set while it is elected.
    """
    policy = Policy.of(
        settings.config,
        min_hosts=settings.min_hosts,
        max_hosts=settings.max_hosts,
        num_workers=settings.num_workers,
        feasible_counts=settings.feasible_hosts,
    )
    run, clock = settings.run_directory, SteadyClock()
    driver = Driver(
        client, keys, keeper, settings.host, policy, incidents_directory=run.incidents,
        watched=watched_directories(settings.config, run), checkpoints=local_checkpoints(settings.config, run),
        leading=leading, clock=clock,
        make_notifier=notifier_of(settings.config, client, keys, clock),
    )  # fmt: skip
    return driver.run


class DriverThread:
    """Runs the driver of this host until `close`."""

    def __init__(self, run_driver: RunDriver) -> None:
        self._stop = threading.Event()
        self._thread = LastingThread("driver", lambda: run_driver(self._stop), self._stop)

    @property
    def trouble(self) -> str:
        """What this host's driver stumbled over last; empty where nothing was."""
        return self._thread.trouble

    def close(self) -> None:
        """Have it step down, and wait until it has."""
        self._stop.set()
        self._thread.join()
