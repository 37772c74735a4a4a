"""Jobs in the etcd that all tests share: each test of the launcher has its own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest

from megatrain.contracts.records.host_records import HostRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.wire import KeyRange
from megatrain_launcher.executor.membership import Membership

_numbers = itertools.count()


@pytest.fixture
def keys(client: EtcdClient) -> Iterator[JobKeys]:
    """The keys of a job that no other test uses."""
    found = JobKeys(f"job-{next(_numbers)}")
    yield found
    client.delete(KeyRange.prefix(found.prefix))


@pytest.fixture
def member(client: EtcdClient, keys: JobKeys) -> Iterator[Callable[..., Membership]]:
    """Return a function that registers hosts; they leave after the test."""
    opened: list[Membership] = []

    def make(record: HostRecord, ttl_s: int = 10) -> Membership:
        one = Membership(client, keys, ttl_s=ttl_s, renew_s=0.2)
        one.register(record)
        opened.append(one)
        return one

    yield make
    for one in opened:
        one.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("etcd lease", "membership"))]
