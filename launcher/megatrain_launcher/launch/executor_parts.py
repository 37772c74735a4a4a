"""The parts of an executor on each platform."""

from __future__ import annotations

import threading
from collections.abc import Callable

from megatrain.contracts.records.job_keys import JobKeys
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.lease_keeper import LeaseKeeper
from megatrain_launcher.executor.driver_thread import RunDriver, driver_of
from megatrain_launcher.executor.executor import ExecutorParts
from megatrain_launcher.executor.settings import ExecutorSettings
from megatrain_launcher.hosts.adapter import HostAdapter
from megatrain_launcher.launch.cordons import CordonWatch


def parts_with(platform: HostAdapter) -> ExecutorParts:
    """Return the executor's parts, with a driver that passes its cordons on to the platform unless that is local."""
    if platform.name == "local":
        return ExecutorParts()

    def make_driver(
        settings: ExecutorSettings,
        client: EtcdClient,
        keys: JobKeys,
        keeper: Callable[[], LeaseKeeper],
        leading: threading.Event,
    ) -> RunDriver:
        run_driver = driver_of(settings, client, keys, keeper, leading)

        def run(stop: threading.Event) -> None:
            with CordonWatch(client, keys, settings.host, platform):
                run_driver(stop)

        return run

    return ExecutorParts(make_driver=make_driver)
