"""How many checkpoints storage did not take, counted once each, by what the hosts tell in etcd."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megatrain.contracts.records.host_records import HostSaves
from megatrain_diagnostics.metrics.job_records import SaveFailures
from megatrain_job.jobs.etcd_job import EtcdPoll
from tests.helpers.launched_job import make_snapshot, make_status


def poll(*failed: int | None) -> EtcdPoll:
    """Return a snapshot of hosts with these numbers of failures in a row; None: a host without a report about saves."""
    statuses = {
        f"host-{number}": make_status(number, saves=None if count is None else HostSaves(num_failed=count))
        for number, count in enumerate(failed, start=1)
    }
    return EtcdPoll(make_snapshot(statuses=statuses))


@pytest.mark.parametrize(
    ("polls", "count"),
    [
        ([EtcdPoll(), poll(0, 0), poll(0, 0)], 0),
        ([poll(0), poll(1), poll(1), poll(2)], 2),
        ([poll(0, 0), poll(1, 0), poll(1, 1), poll(2, 1)], 2),
        ([poll(0, 0), poll(1, 1)], 1),
        ([poll(2), poll(0), poll(1)], 1),
        ([poll(3), poll(1)], 1),
        ([poll(None), poll(1), poll(None)], 1),
        ([poll(1), EtcdPoll(), poll(1)], 1),
    ],
)
def test_each_failure_is_counted_once(polls: list[EtcdPoll], count: int) -> None:
    failures = SaveFailures()
    for before, now in pairwise(polls):
        failures.follow(before, now)
    assert failures.count == count
