"""Prints the address of a job's web page: when it is first served, and whenever it has moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.diag_records import DashboardRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.follower import Follower
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.watch import WatchEvent
from megatrain_job.coordination.wire import KeyRange


@contextmanager
def reported_dashboard(settings: EtcdSettings, keys: JobKeys, report: Callable[[str], None]) -> Iterator[None]:
    """Report the address of the page during the block, each address once."""
    last_url = ""

    def take(event: WatchEvent) -> None:
        nonlocal last_url
        for item in event.written:
            with suppress(CoordinationError):  # the page itself must repair a record that cannot be read
                record = decode(DashboardRecord, item.value, keys.dashboard)
                way_in = f" (sign in with the token in {record.token_file})" if record.token_file else ""
                if record.url != last_url:
                    report(f"dashboard: {record.url}{way_in}")
                    last_url = record.url

    with EtcdClient(settings) as client, Follower(client, KeyRange.key(keys.dashboard), take):
        yield
