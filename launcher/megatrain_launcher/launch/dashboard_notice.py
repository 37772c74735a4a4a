"""Telling whoever launched a job where its web page is: as soon as it is served, and again when it is elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from megatrain.contracts.diag_records import DashboardRecord
from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.record import decode
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.settings import EtcdSettings
from megatrain.coordination.watch import ChangeKind, Snapshot, Watch
from megatrain.coordination.wire import KeyRange, KeyValue

_LOOK_S = 0.5


@contextmanager
def told_dashboard(settings: EtcdSettings, keys: JobKeys, tell: Callable[[str], None]) -> Iterator[None]:
    """Tell the address of the page during the block, each one once."""
    is_over = threading.Event()
    thread = threading.Thread(target=_follow, args=(settings, keys, tell, is_over), name="address of the page")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _follow(settings: EtcdSettings, keys: JobKeys, tell: Callable[[str], None], is_over: threading.Event) -> None:
    told = ""
    with EtcdClient(settings) as client, Watch(client, KeyRange.key(keys.dashboard)) as watch:
        while not is_over.is_set():
            for item in _written(watch):
                with suppress(CoordinationError):  # a record that cannot be read is the page's to mend
                    url = decode(DashboardRecord, item.value, keys.dashboard).url
                    if url != told:
                        tell(f"dashboard: {url}")
                        told = url


def _written(watch: Watch) -> tuple[KeyValue, ...]:
    event = watch.next(_LOOK_S)
    if event is None:
        return ()
    if isinstance(event, Snapshot):
        return event.items
    return tuple(change.item for change in event.changes if change.kind is ChangeKind.PUT)
