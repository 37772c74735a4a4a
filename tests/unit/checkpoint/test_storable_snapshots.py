"""Snapshots that a restart waits for: they are in memory, can still be stored, and could not be restored from
memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from megatrain.arena.plans import HostPlan
from megatrain.arena.slot_layout import SealedSnapshot
from megatrain.checkpoint.attach import give_up
from megatrain.checkpoint.host_reports import HeldSnapshot, HostReport, maybe_storable_snapshots, storable_snapshots
from megatrain.checkpoint.write_marks import read_failed
from megatrain.checkpoint_format.checkpoint_files import is_unfinished
from tests.helpers.arena_snapshots import make_job
from tests.helpers.checkpoint_tree import path_of, tree
from tests.helpers.writer_process import wait_for, writer_thread

OLD, NEW = SealedSnapshot(40, 0, 4), SealedSnapshot(50, 0, 5)


def test_given_up_checkpoint_is_unfinished_not_damaged(tmp_path: Path) -> None:
    """Possibly nothing of it was written yet, and the job must resume from another checkpoint, or begin."""
    job = make_job(tmp_path, 2)
    snapshot = SealedSnapshot(10, 2, 4)
    plans = [HostPlan.read(arena.host_plan) for arena in job.arenas]
    give_up(plans[1], [snapshot])
    assert read_failed(job.step(10), snapshot, 1) is not None
    assert is_unfinished(job.step(10))
    # The lost host's writer is informed at once.
    job.put_snapshot(step=10, snapshot=4)
    with writer_thread(job.arenas[0]):
        assert "host 1 gave up: a newer start" in wait_for(job.arenas[0], failures=1).last_error


def test_stored_snapshot_is_not_given_up(tmp_path: Path) -> None:
    job = make_job(tmp_path, 1)
    job.put_snapshot(step=10, snapshot=4)
    with writer_thread(job.arena):
        wait_for(job.arena, persisted=1)
    before = tree(path_of(job.step(10)))
    give_up(HostPlan.read(job.arena.host_plan), [SealedSnapshot(10, 2, 4)])
    assert tree(path_of(job.step(10))) == before


def held(owner: int, snapshot: SealedSnapshot, *, is_pending: bool = True, is_copy: bool = False) -> HeldSnapshot:
    return HeldSnapshot(owner, snapshot, f"plan-{owner}", is_pending, is_copy)


def report(host: str, ranks: tuple[int, ...], num_hosts: int, *snapshots: HeldSnapshot) -> HostReport:
    return HostReport(host, "plan", 0, snapshots, last_ranks=ranks, last_hosts=num_hosts)


def other(host: str) -> HostReport:
    """Return the answer of a rank that is not the first of its host."""
    return HostReport(host, "plan", -1, ())


def test_snapshot_that_all_ranks_of_all_hosts_have_is_storable() -> None:
    hosts = [
        report("a", (0, 1), 2, held(0, OLD), held(1, OLD), held(0, NEW), held(1, NEW)),
        other("a"),
        report("b", (2, 3), 2, held(2, OLD), held(3, OLD, is_pending=False), held(2, NEW)),
        other("b"),
    ]
    assert storable_snapshots(hosts) == {OLD}
    assert storable_snapshots([HostReport.from_json(json.loads(json.dumps(host.to_json()))) for host in hosts]) == {OLD}


def test_snapshot_that_no_writer_can_complete_is_not_storable() -> None:
    for reason, hosts in {
        "no host needs it": [report("a", (0,), 1, held(0, OLD, is_pending=False))],
        "rank 1 never sealed it": [report("a", (0, 1), 1, held(0, OLD), held(1, OLD, is_copy=True)), other("a")],
        "a host is lost": [report("a", (0,), 2, held(0, OLD)), report("new", (), 0)],
        "the host has no plan": [report("a", (), 0, held(0, OLD))],
    }.items():
        assert storable_snapshots(hosts) == set(), reason
    assert storable_snapshots([report("a", (0,), 1, held(0, OLD)), report("new", (), 0)]) == {OLD}


def test_snapshot_of_a_lost_hosts_writer_is_maybe_storable() -> None:
    left = report("a", (0,), 2, held(0, OLD), held(0, NEW))
    assert maybe_storable_snapshots([left, report("new", (), 0)], newer_than=-1) == {OLD, NEW}
    # Storage has it, or it does not wait to be written.
    assert maybe_storable_snapshots([left, report("new", (), 0)], newer_than=OLD.step) == {NEW}
    assert maybe_storable_snapshots([report("a", (0,), 2, held(0, OLD, is_pending=False))], newer_than=-1) == set()


def test_snapshot_that_no_lost_host_can_store_is_given_up() -> None:
    without_lost_hosts = [report("a", (0,), 1, held(0, OLD)), report("new", (), 0)]
    assert maybe_storable_snapshots(without_lost_hosts, newer_than=-1) == set()
    living_host_lacks_it = [report("a", (0,), 3, held(0, OLD)), report("b", (1, 2), 3, held(1, OLD)), other("b")]
    assert maybe_storable_snapshots(living_host_lacks_it, newer_than=-1) == set()


def test_report_of_a_host_of_an_older_round_is_ignored() -> None:
    newer = SealedSnapshot(50, 3, 5)
    left = replace(report("a", (0,), 2, held(0, newer)), last_round=3)
    spare = replace(report("spare", (1,), 2, held(1, OLD)), last_round=1)
    assert maybe_storable_snapshots([left, spare], newer_than=40) == {newer}
