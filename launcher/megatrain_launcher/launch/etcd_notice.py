"""Publishes problems with the files of a job's own etcd in that etcd, where `status` and the web page read them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.problem_reports import JobProblem
from megatrain.contracts.records.record import encode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_launcher.etcd.process import EtcdProcess

SOURCE = "etcd"
_POLL_S = 0.5


@contextmanager
def published_problems(etcd: EtcdProcess, keys: JobKeys) -> Iterator[None]:
    """During the block, publish the problems of the etcd process; the key exists while there are problems."""
    is_over = threading.Event()
    with EtcdClient(etcd.settings) as client:
        thread = RestartingThread("etcd notice", lambda: _follow(etcd, client, keys.problem(SOURCE), is_over), is_over)
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def _follow(etcd: EtcdProcess, client: EtcdClient, key: str, is_over: threading.Event) -> None:
    published: tuple[str, ...] | None = None
    while not is_over.wait(_POLL_S):
        problems = etcd.problems
        if problems == published:
            continue
        try:
            if problems:
                client.put(key, encode(JobProblem(SOURCE, "; ".join(problems), time.time())))
            else:
                client.delete(key)
            published = problems
        except CoordinationError:
            continue  # etcd is just being started again
