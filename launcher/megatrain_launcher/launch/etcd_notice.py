"""The state of the files of a job's own etcd, reported in that etcd, where `status` and the page read it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.trouble import Trouble
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_launcher.etcd.process import EtcdProcess

SOURCE = "etcd"
_POLL_S = 0.5


@contextmanager
def published_troubles(etcd: EtcdProcess, keys: JobKeys) -> Iterator[None]:
    """Keep the key of etcd's trouble equal to its process's state, during the block."""
    is_over = threading.Event()
    with EtcdClient(etcd.settings) as client:
        thread = RestartingThread("etcd notice", lambda: _follow(etcd, client, keys.trouble(SOURCE), is_over), is_over)
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def _follow(etcd: EtcdProcess, client: EtcdClient, key: str, is_over: threading.Event) -> None:
    published: tuple[str, ...] | None = None
    while not is_over.wait(_POLL_S):
        troubles = etcd.troubles
        if troubles == published:
            continue
        try:
            if troubles:
                client.put(key, encode(Trouble(SOURCE, "; ".join(troubles), time.time())))
            else:
                client.delete(key)
            published = troubles
        except CoordinationError:
            continue  # it is just being started again
