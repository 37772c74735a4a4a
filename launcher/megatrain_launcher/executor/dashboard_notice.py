"""Prints where a job's web page is: as soon as it is served, and again when it has moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from megatrain.contracts.diag_records import DashboardRecord
from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.record import decode
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.follower import Follower
from megatrain.coordination.settings import EtcdSettings
from megatrain.coordination.watch import WatchEvent
from megatrain.coordination.wire import KeyRange


@contextmanager
def told_dashboard(settings: EtcdSettings, keys: JobKeys, tell: Callable[[str], None]) -> Iterator[None]:
    """Tell the address of the page during the block, each one once."""
    told = ""

    def take(event: WatchEvent) -> None:
        nonlocal told
        for item in event.written:
            with suppress(CoordinationError):  # a record that cannot be read is the page's to mend
                record = decode(DashboardRecord, item.value, keys.dashboard)
                way_in = f" (sign in with the token in {record.token_file})" if record.token_file else ""
                if record.url != told:
                    tell(f"dashboard: {record.url}{way_in}")
                    told = record.url

    with EtcdClient(settings) as client, Follower(client, KeyRange.key(keys.dashboard), take):
        yield
