"""The writer program of a host: its start, its end, and its crashes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatrain.arena.directory import Arena, create_arena
from megatrain.arena.plans import WriterStatus
from megatrain.arena.slot_layout import Persist
from megatrain.checkpoint import host_writer
from megatrain.checkpoint.host_writer import HostWriter
from megatrain.checkpoint.verification import verify_checkpoint
from megatrain.checkpoint_format.commit import committed_steps
from megatrain.checkpoint_format.lineage import candidates, unfinished
from megatrain.contracts.errors import CheckpointError
from tests.helpers.arena_snapshots import SnapshotJob, make_job
from tests.helpers.checkpoint_tree import path_of, put_checkpoint, tree
from tests.helpers.writer_process import crash_writer, drain


def say(arena: Arena, pid: int, *, persisted: int, failures: int) -> None:
    WriterStatus(
        pid=pid, branch="main", round=0, num_persisted=persisted, num_failures=failures,
        last_persisted_step=10 * persisted if persisted else None, last_error="disk full" if failures else "",
        last_write_s=2.0, last_write_bytes=10**9,
    ).write(arena.writer_status)  # fmt: skip


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return create_arena(tmp_path / "arena")


@pytest.fixture
def writer(arena: Arena, tmp_path: Path) -> HostWriter:
    return HostWriter(arena, tmp_path / "log")


def test_each_thing_is_reported_once(writer: HostWriter, arena: Arena) -> None:
    assert writer.new_messages() == []
    say(arena, 100, persisted=1, failures=0)
    assert writer.new_messages() == ["checkpoint of step 10 is in storage (this host: 1 GB in 2.0 s, 500 MB/s)"]
    assert writer.new_messages() == []
    say(arena, 100, persisted=1, failures=1)
    assert writer.new_messages() == ["a checkpoint FAILED and is tried again at the next interval: disk full"]


def test_restarted_writer_counts_from_zero(writer: HostWriter, arena: Arena) -> None:
    say(arena, 100, persisted=3, failures=2)
    assert len(writer.new_messages()) == 2
    say(arena, 200, persisted=1, failures=1)
    assert len(writer.new_messages()) == 2


def test_earlier_results_are_not_reported(arena: Arena, tmp_path: Path) -> None:
    say(arena, 100, persisted=3, failures=2)
    writer = HostWriter(arena, tmp_path / "log")
    assert writer.new_messages() == []
    assert writer.last_error() == "disk full"


def test_writer_that_cannot_start_is_reported_and_retried(
    writer: HostWriter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise CheckpointError("no more processes")

    monkeypatch.setattr(host_writer, "wake_or_start_writer", refuse)
    writer.wake_or_start()
    assert writer.new_messages() == ["no more processes; the writer is started again later"]
    assert writer.new_messages() == []
    assert writer.last_error() == f"see {tmp_path / 'log'}"


FILES = ["r000002-rank-00000.distcp", "r000002-rank-00001.distcp"]
WHOLE = [".metadata", "COMMIT", "manifest", "r000002-index.json", "r000002-metadata", *FILES]


def newest_step(job: SnapshotJob) -> int | None:
    """Return the step from which the job would resume; its checkpoint must be intact."""
    found = candidates(job.checkpoints)
    if not found:
        return None
    if found[0].step >= 10:
        assert verify_checkpoint(found[0].location) == []
    return found[0].step


@pytest.mark.slow
def test_killed_in_a_first_save(tmp_path: Path) -> None:
    points: list[str] = []
    while True:
        job = make_job(tmp_path / str(len(points)))
        job.put_snapshot(step=10, snapshot=4)
        point = crash_writer(job.arena, len(points))
        if point is None:
            break
        points.append(point)
        is_committed = "write COMMIT" in points[:-1]
        assert newest_step(job) == (10 if is_committed else None)
        if not is_committed:
            assert Persist.DONE not in job.persist_words()[10]
            assert unfinished(job.checkpoints) == ([job.step(10)] if len(points) > 1 else [])
        drain(job.arena)
        assert newest_step(job) == 10
        assert sorted(re.sub(r"r000002-(manifest)-.*", r"\1", name) for name in tree(path_of(job.step(10)))) == WHOLE
    assert points[0] == "write WRITING"
    for name in (*FILES, "host-r000002-00000.done", "-metadata", "-index", "-manifest-", "COMMIT", ".metadata"):
        assert any(name in point for point in points), name
    assert points[-1] == "persist word"


@pytest.mark.slow
def test_killed_after_the_commit(tmp_path: Path) -> None:
    """While it reports the commit, cleans up and removes older checkpoints."""
    points: list[str] = []
    while True:
        job = make_job(tmp_path / str(len(points)), keep_last=1)
        for step in (1, 2):
            put_checkpoint(job.checkpoints / "main", step, files={})
        job.put_snapshot(step=10, snapshot=4)
        point = crash_writer(job.arena, len(points), "write COMMIT")
        if point is None:
            break
        points.append(point)
        assert newest_step(job) == 10
        job.put_snapshot(step=20, snapshot=5)
        drain(job.arena)
        assert newest_step(job) == 20
        assert verify_checkpoint(job.step(20)) == []
        assert committed_steps(job.checkpoints / "main") == [20]
        assert [entry.name for entry in (job.checkpoints / "main").entries()] == ["BRANCH", "step-000000020"]
    assert {"remove WRITING", "persist word", "remove COMMIT", "remove step-000000001"} <= set(points)


@pytest.mark.slow
def test_lost_files_are_written_again_after_the_host_was_done(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    job.put_snapshot(step=10, snapshot=4)
    assert crash_writer(job.arena, 0, "write host-r000002-00000.done") == "write r000002-metadata"
    (job.step(10) / FILES[1]).remove()
    drain(job.arena)
    assert newest_step(job) == 10
