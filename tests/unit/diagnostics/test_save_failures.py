"""The number of checkpoints that could not be stored, each counted once, from the records of hosts in etcd."""

from __future__ import annotations

from itertools import pairwise

from megatrain.contracts.records.host_records import HostSaves
from megatrain_diagnostics.metrics.job_records import SaveFailures
from megatrain_job.jobs.etcd_job import EtcdPoll
from tests.helpers.launched_job import make_snapshot, make_status


def poll(failed: tuple[int | None, ...]) -> EtcdPoll:
    """Return a poll of hosts with these numbers of consecutive failures.

    None: a host without a report about saves. No hosts: nothing was read.
    """
    statuses = {
        f"host-{number}": make_status(number, saves=None if count is None else HostSaves(num_failed=count))
        for number, count in enumerate(failed, start=1)
    }
    return EtcdPoll(make_snapshot(statuses=statuses)) if failed else EtcdPoll()


def test_each_failure_is_counted_once() -> None:
    cases: tuple[tuple[tuple[tuple[int | None, ...], ...], int], ...] = (
        (((), (0, 0), (0, 0)), 0),
        (((0,), (1,), (1,), (2,)), 2),
        (((0, 0), (1, 0), (1, 1), (2, 1)), 2),
        (((0, 0), (1, 1)), 1),
        (((2,), (0,), (1,)), 1),
        (((3,), (1,)), 1),
        (((None,), (1,), (None,)), 1),
        (((1,), (), (1,)), 1),
    )
    for polls, count in cases:
        failures = SaveFailures()
        for before, now in pairwise(map(poll, polls)):
            failures.follow(before, now)
        assert failures.count == count, polls
