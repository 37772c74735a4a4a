"""How many checkpoints storage did not take, counted once each, by what the hosts tell in etcd."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megatrain.contracts.host_records import HostSaves
from megatrain.jobs.etcd_job import EtcdLook
from megatrain_diagnostics.metrics.job_records import SaveFailures
from tests.helpers.launched_job import make_snapshot, make_status


def look(*failed: int | None) -> EtcdLook:
    """Return a snapshot of hosts that report so many failures in a row; None: a host without a report about saves."""
    statuses = {
        f"host-{number}": make_status(number, saves=None if count is None else HostSaves(num_failed=count))
        for number, count in enumerate(failed, start=1)
    }
    return EtcdLook(make_snapshot(statuses=statuses))


@pytest.mark.parametrize(
    ("looks", "count"),
    [
        ([EtcdLook(), look(0, 0), look(0, 0)], 0),
        ([look(0), look(1), look(1), look(2)], 2),
        ([look(0, 0), look(1, 0), look(1, 1), look(2, 1)], 2),
        ([look(0, 0), look(1, 1)], 1),
        ([look(2), look(0), look(1)], 1),
        ([look(3), look(1)], 1),
        ([look(None), look(1), look(None)], 1),
        ([look(1), EtcdLook(), look(1)], 1),
    ],
)
def test_each_failure_is_counted_once(looks: list[EtcdLook], count: int) -> None:
    failures = SaveFailures()
    for before, now in pairwise(looks):
        failures.follow(before, now)
    assert failures.count == count
