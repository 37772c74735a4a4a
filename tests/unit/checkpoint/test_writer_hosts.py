"""Writers of several hosts write one checkpoint: they share storage and nothing else."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.arena.directory import wake_writer
from megatrain.arena.plans import HostPlan
from megatrain.arena.sealed import sealed_slots
from megatrain.arena.slot_file import write_persist
from megatrain.arena.slot_layout import Persist, SealedSnapshot
from megatrain.checkpoint.verification import verify_checkpoint
from megatrain.checkpoint.write_marks import DoneMark, WritingMark
from megatrain.checkpoint_format.checkpoint_files import is_unfinished, read_manifest
from megatrain.checkpoint_format.checkpoint_names import is_manifest_name
from megatrain.checkpoint_format.commit import is_committed
from megatrain.checkpoint_format.manifest import FileEntry
from megatrain.contracts.errors import CheckpointError
from tests.helpers.arena_snapshots import SnapshotJob, make_job, put_slot
from tests.helpers.checkpoint_tree import path_of, tree
from tests.helpers.waiting import wait_until
from tests.helpers.writer_process import crash_writer, running_writer, wait_for, writer_thread

SNAPSHOT = SealedSnapshot(step=10, round=2, snapshot=4)
FILES = [f"r000002-rank-{rank:05d}.distcp" for rank in range(4)]


def wake(job: SnapshotJob) -> None:
    for arena in job.arenas:
        wake_writer(arena)


def test_all_hosts_make_one_checkpoint(tmp_path: Path) -> None:
    job = make_job(tmp_path, 2)
    with ExitStack() as stack:
        for arena in job.arenas:
            stack.enter_context(running_writer(arena))
        for step, snapshot in ((10, 4), (20, 5)):
            job.put_snapshot(step=step, snapshot=snapshot)
            wake(job)
        for arena in job.arenas:
            status = wait_for(arena, persisted=2)
            assert status.last_persisted_step == 20
        assert job.persist_words() == {10: {Persist.DONE}, 20: {Persist.DONE}}
        for step in (10, 20):
            assert verify_checkpoint(job.step(step)) == []
            assert sorted(read_manifest(job.step(step)).files) == ["r000002-index.json", "r000002-metadata", *FILES]
        # The coordinator cleans up after it has reported that it is done.
        wait_until(lambda: len(tree(path_of(job.step(20)))) == 9, "a directory without leftovers")


def test_the_coordinator_waits_for_all(tmp_path: Path) -> None:
    job = make_job(tmp_path, 3)
    job.put_snapshot(step=10, snapshot=4)
    with writer_thread(job.arenas[0]), writer_thread(job.arenas[2]):
        for index in (0, 2):
            wait_until(lambda i=index: DoneMark.read(job.step(10), SNAPSHOT, i) is not None, "done")  # type: ignore[misc]
        assert not any(is_manifest_name(entry.name) for entry in job.step(10).entries())
        with writer_thread(job.arenas[1]):
            for arena in job.arenas:
                wait_for(arena, persisted=1)
    assert verify_checkpoint(job.step(10)) == []


def test_coordinator_gives_up_on_a_host_that_writes_nothing(tmp_path: Path) -> None:
    job = make_job(tmp_path, 3, commit_timeout_s=0.1)
    job.put_snapshot(step=10, snapshot=4)
    with writer_thread(job.arenas[0]):
        problem = wait_for(job.arenas[0], failures=1).last_error
        assert "waited 0.1 s for the data files of hosts 1 and 2; see the writer's log there" in problem
    assert not is_committed(job.step(10))
    assert is_unfinished(job.step(10))
    # The files of this host are gone; a late host learns at once that the attempt is over.
    assert not any((job.step(10) / name).exists() for name in FILES)
    with writer_thread(job.arenas[1]):
        problem = wait_for(job.arenas[1], failures=1).last_error
        assert "host 0 gave up: " in problem
        assert "waited 0.1 s for the data files of hosts 1 and 2" in problem


def test_host_gives_up_on_a_coordinator_that_does_not_commit(tmp_path: Path) -> None:
    job = make_job(tmp_path, 2, commit_timeout_s=0.1)
    job.put_snapshot(step=10, snapshot=4)
    with writer_thread(job.arenas[1]):
        problem = wait_for(job.arenas[1], failures=1).last_error
        assert "waited 0.1 s for COMMIT, which the host of rank 0 writes" in problem
    # `.done` was written: a coordinator that has read it may still commit these.
    assert all((job.step(10) / name).exists() for name in FILES[2:])


def test_a_host_that_fails_is_not_waited_for(tmp_path: Path) -> None:
    job = make_job(tmp_path, 2, commit_timeout_s=1000.0)
    job.put_snapshot(step=10, snapshot=4)

    def fail(action: str, path: str) -> None:
        if action == "append" and path.endswith(FILES[3]):
            raise CheckpointError("disk full")

    with writer_thread(job.arenas[0]), writer_thread(job.arenas[1], fail):
        assert wait_for(job.arenas[1], failures=1).last_error == "step 10: not saved: disk full"
        assert "host 1 gave up: disk full" in wait_for(job.arenas[0], failures=1).last_error
        assert job.persist_words() == {10: {Persist.FAILED}}
        assert not any((job.step(10) / name).exists() for name in FILES)
        assert is_unfinished(job.step(10))


def test_host_with_a_lost_mark_is_not_awaited_once_ranks_know(tmp_path: Path) -> None:
    """On a full disk a writer cannot even record that it gave up; `Snapshots` passes it on to the ranks of other
    hosts."""
    job = make_job(tmp_path, 2, commit_timeout_s=1000.0)

    def fail(action: str, path: str) -> None:
        raise CheckpointError("disk full")

    job.put_snapshot(step=10, snapshot=4)
    with writer_thread(job.arenas[0], fail), writer_thread(job.arenas[1]):
        assert "disk full" in wait_for(job.arenas[0], failures=1).last_error
        wait_until(lambda: DoneMark.read(job.step(10), SNAPSHOT, 1) is not None, "done")
        for slot in sealed_slots(job.arenas[1]):
            write_persist(slot.path, slot.snapshot.snapshot, Persist.FAILED)
        assert "the ranks gave this snapshot up" in wait_for(job.arenas[1], failures=1).last_error
    assert not is_committed(job.step(10))


def test_the_next_snapshot_after_one_that_failed(tmp_path: Path) -> None:
    job = make_job(tmp_path, 2, commit_timeout_s=1000.0)
    is_full = [True]

    def fail(action: str, path: str) -> None:
        if is_full[0] and action == "write" and "-manifest-" in path:
            raise CheckpointError("disk full")

    with writer_thread(job.arenas[0], fail), writer_thread(job.arenas[1]):
        job.put_snapshot(step=10, snapshot=4)
        wake(job)
        for arena in job.arenas:
            wait_for(arena, failures=1)
        is_full[0] = False
        job.put_snapshot(step=20, snapshot=5)
        wake(job)
        for arena in job.arenas:
            wait_for(arena, failures=1, persisted=1)
    assert verify_checkpoint(job.step(20)) == []
    # No writer will finish it, and none waits for it.
    assert not job.step(10).exists()


def test_mark_of_another_snapshot_does_not_count(tmp_path: Path) -> None:
    job = make_job(tmp_path, 2, commit_timeout_s=0.1)
    entry = FileEntry(10, "items-sha256:" + "0a" * 32)
    DoneMark(replace(SNAPSHOT, snapshot=3), 1, 0.1, {FILES[2]: entry}).write(job.step(10))
    job.put_snapshot(step=10, snapshot=4)
    with writer_thread(job.arenas[0]):
        assert "data files of host 1;" in wait_for(job.arenas[0], failures=1).last_error


def test_two_hosts_of_the_same_ranks_are_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path, 2)
    entry = FileEntry(10, "items-sha256:" + "0a" * 32)
    DoneMark(SNAPSHOT, 1, 0.1, {FILES[0]: entry}).write(job.step(10))
    job.put_snapshot(step=10, snapshot=4)
    with writer_thread(job.arenas[0]):
        problem = wait_for(job.arenas[0], failures=1).last_error
    assert "r000002-rank-00000.distcp: written by two hosts; host.json is wrong" in problem
    assert not is_committed(job.step(10))


def test_a_file_that_is_gone_before_the_commit(tmp_path: Path) -> None:
    job = make_job(tmp_path, 2)
    job.put_snapshot(step=10, snapshot=4)

    def remove(action: str, path: str) -> None:
        if action == "write" and "-manifest-" in path:
            (job.step(10) / FILES[3]).remove()

    with writer_thread(job.arenas[0], remove), writer_thread(job.arenas[1]):
        assert f"{FILES[3]}: was removed after it was written" in wait_for(job.arenas[0], failures=1).last_error
        wait_for(job.arenas[1], failures=1)
    assert not is_committed(job.step(10))


def test_a_newer_round_with_a_checkpoint_ends_the_wait(tmp_path: Path) -> None:
    """A host of the older round is gone, and a wait for it would delay the job."""
    job = make_job(tmp_path, 2, commit_timeout_s=1000.0)
    coordinator = job.arenas[0]
    job.put_snapshot(step=10, snapshot=4)
    with writer_thread(coordinator):
        wait_until(lambda: DoneMark.read(job.step(10), SNAPSHOT, 0) is not None, "done")
        plan = replace(HostPlan.read(coordinator.host_plan), round=3, num_hosts=1)
        other = make_job(tmp_path / "other").arena
        coordinator.metadata(3).write_bytes(other.metadata(2).read_bytes())
        coordinator.index(3).write_bytes(other.index(2).read_bytes())
        plan.write(coordinator.host_plan)
        for rank in plan.ranks:
            put_slot(coordinator, rank, step=15, snapshot=5, round_number=3)
        wait_for(coordinator, failures=1, persisted=1)
    assert is_committed(job.step(15))
    assert not is_committed(job.step(10))


@pytest.mark.parametrize("index", [0, 1])
def test_a_writer_whose_host_is_left_behind_waits_no_longer(tmp_path: Path, index: int) -> None:
    """A newer round makes the same checkpoint with other hosts; the lost host's writer sees only the state of
    storage."""
    job = make_job(tmp_path, 2, commit_timeout_s=1000.0)
    job.put_snapshot(step=10, snapshot=4)
    with writer_thread(job.arenas[index]):
        wait_until(lambda: DoneMark.read(job.step(10), SNAPSHOT, index) is not None, "done")
        WritingMark(3, "demo", 0.0).write(job.step(10))
        assert "round 3 is writing this checkpoint" in wait_for(job.arenas[index], failures=1).last_error


@pytest.mark.slow
def test_a_writer_that_is_killed_goes_on_where_its_host_was(tmp_path: Path) -> None:
    """Killed before each change of a host that is not the coordinator, which waits."""
    points = []
    number = 0
    is_killed = True
    while is_killed:
        job = make_job(tmp_path / str(number), 2)
        job.put_snapshot(step=10, snapshot=4)
        with running_writer(job.arenas[0]):
            point = crash_writer(job.arenas[1], number)
            is_killed = point is not None
            points.append(point)
            if is_killed:
                with running_writer(job.arenas[1]):
                    wait_for(job.arenas[1], persisted=1)
                    wait_for(job.arenas[0], persisted=1)
                assert job.persist_words() == {10: {Persist.DONE}}
        assert verify_checkpoint(job.step(10)) == []
        # not every change in the middle of a file, which test_host_writer.py tests with a single host
        number += 3
    assert len(points) >= 4
