"""Passes the driver's cordons to the cluster, so that no other job gets a host that this one evicted.

Every candidate for the driver watches; only the current driver passes cordons on. Cordons that people set are not
passed on. If the cluster refuses, that is only logged: the job excludes the host itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Self

from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import Cordon
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.election import Election
from megatrain_job.coordination.follower import Follower
from megatrain_job.coordination.lease_keeper import LeaseKeeper
from megatrain_job.coordination.watch_event import Changes, WatchEvent
from megatrain_job.coordination.wire import KeyRange, KeyValue
from megatrain_launcher.executor.driver_thread import RunDriver, driver_of
from megatrain_launcher.executor.executor import ExecutorParts
from megatrain_launcher.executor.settings import ExecutorSettings
from megatrain_launcher.hosts.adapter import CordonError, HostAdapter

_logger = logging.getLogger(__name__)
_BY_DRIVER = "driver"


class CordonWatch(Closable):
    """A context manager that passes cordons on inside its block."""

    def __init__(self, client: EtcdClient, keys: JobKeys, host: str, platform: HostAdapter) -> None:
        self._client = client
        self._keys = keys
        self._host = host
        self._platform = platform
        self._range = KeyRange.prefix(keys.directory("cordons"))
        self._follower: Follower | None = None

    def __enter__(self) -> Self:
        self._follower = Follower(self._client, self._range, self._take)
        return self

    def close(self) -> None:
        if self._follower is not None:
            self._follower.close()

    def _take(self, event: WatchEvent) -> None:
        # cordons in a snapshot were written before this watch began: an earlier driver passed them on
        if isinstance(event, Changes):
            for item in event.written:
                self._pass_on(item)

    def _pass_on(self, item: KeyValue) -> None:
        try:
            cordon = decode(Cordon, item.value, item.key.decode(errors="replace"))
            leader = Election(self._client, self._keys.election).leader()
            if cordon.by != _BY_DRIVER or leader is None or leader.value != self._host.encode():
                return
            done = self._platform.cordon(cordon.host, cordon.reason)
        except (CordonError, CoordinationError) as error:
            _logger.warning("%s", error)
        else:
            _logger.info("%s: %s", done, cordon.reason)


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
        is_suspected: Callable[[], bool],
    ) -> RunDriver:
        run_driver = driver_of(settings, client, keys, keeper, leading, is_suspected)

        def run(stop: threading.Event) -> None:
            with CordonWatch(client, keys, settings.host, platform):
                run_driver(stop)

        return run

    return ExecutorParts(make_driver=make_driver)
