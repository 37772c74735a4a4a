"""A writer whose storage or arena fails reports it, leaves nothing that counts as a checkpoint, and continues."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.arena.directory import wake_writer
from megatrain.arena.plans import RankPlan
from megatrain.arena.slot_layout import Persist, SealedSnapshot, SlotState
from megatrain.checkpoint import writer
from megatrain.checkpoint.peer_fetch import adopt
from megatrain.checkpoint.verification import verify_checkpoint
from megatrain.checkpoint.write_marks import WritingMark
from megatrain.checkpoint_format.branches import read_branch
from megatrain.checkpoint_format.checkpoint_files import is_unfinished
from megatrain.checkpoint_format.commit import committed_steps, is_committed
from megatrain.checkpoint_format.lineage import candidates
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import FileEntry
from megatrain.contracts.errors import CheckpointError
from tests.helpers.arena_snapshots import SnapshotJob, described_by, make_job, put_description, put_slot
from tests.helpers.checkpoint_tree import manifest_path, path_of, put_checkpoint, tree
from tests.helpers.waiting import wait_until
from tests.helpers.writer_process import drain, wait_for, writer_thread


@pytest.fixture
def job(tmp_path: Path) -> SnapshotJob:
    return make_job(tmp_path)


MANIFEST = "r000002-manifest"


def shortened(name: str) -> str:
    """Return the name of a file; without the digest for a manifest."""
    return MANIFEST if name.startswith(MANIFEST) else name


def assert_nothing_is_left(directory: Location) -> None:
    """WRITING stays: it may belong to another round by now, and the next checkpoint removes the directory."""
    assert {entry.name for entry in directory.entries()} <= {"WRITING"}


class FailingStorage:
    """Fails one kind of operation in storage, while it is on."""

    def __init__(self, action: str, name: str) -> None:
        self.is_on = True
        self._what = (action, name)

    def __call__(self, action: str, path: str) -> None:
        if self.is_on and (action, shortened(path.rpartition("/")[2])) == self._what:
            raise CheckpointError(f"{path}: cannot be written: No space left on device")


def persist_next(job: SnapshotJob, step: int, snapshot: int, **expected: int) -> str:
    job.put_snapshot(step=step, snapshot=snapshot)
    wake_writer(job.arena)
    return wait_for(job.arena, **expected).last_error


@pytest.mark.slow(
    kept=[
        "write-WRITING", "append-r000002-rank-00000.distcp", "write-host-r000002-00000.done", "write-r000002-manifest",
    ]
)  # fmt: skip
@pytest.mark.parametrize(
    ("action", "name"),
    [
        ("write", "WRITING"),
        ("create", "r000002-rank-00001.distcp"),
        ("append", "r000002-rank-00000.distcp"),
        ("close", "r000002-rank-00001.distcp"),
        ("write", "host-r000002-00000.done"),
        ("write", "r000002-metadata"),
        ("write", "r000002-index.json"),
        ("write", MANIFEST),
    ],
)
def test_a_full_disk(job: SnapshotJob, action: str, name: str) -> None:
    failing = FailingStorage(action, name)
    with writer_thread(job.arena, failing):
        problem = persist_next(job, 10, 4, failures=1)
        assert re.fullmatch(
            f"step 10: not saved: main/step-000000010/{name}.*: cannot be written: No space left on device", problem
        )
        assert job.persist_words() == {10: {Persist.FAILED}}
        assert list(tree(path_of(job.step(10)))) in ([], ["WRITING"])
        assert candidates(job.checkpoints) == []
        failing.is_on = False
        assert persist_next(job, 20, 5, failures=1, persisted=1) == ""
        assert job.persist_words() == {10: {Persist.FAILED}, 20: {Persist.DONE}}
        assert verify_checkpoint(job.step(20)) == []


def test_a_commit_that_fails_leaves_all_that_it_may_cover(job: SnapshotJob) -> None:
    """COMMIT may still appear: a store that did not answer may have accepted it."""
    failing = FailingStorage("write", "COMMIT")
    with writer_thread(job.arena, failing):
        assert "step-000000010/COMMIT: cannot be written" in persist_next(job, 10, 4, failures=1)
        assert is_unfinished(job.step(10))
        assert len(tree(path_of(job.step(10)))) == 7
        assert candidates(job.checkpoints) == []
        failing.is_on = False
        persist_next(job, 20, 5, failures=1, persisted=1)
    assert not job.step(10).exists()


def test_a_commit_that_only_seemed_to_fail_counts(job: SnapshotJob, monkeypatch: pytest.MonkeyPatch) -> None:
    write_new = LocalLocation.write_new

    def fail_late(place: LocalLocation, content: bytes) -> bool:
        write_new(place, content)
        raise CheckpointError("the directory could not be synced")

    monkeypatch.setattr(LocalLocation, "write_new", fail_late)
    with writer_thread(job.arena):
        assert persist_next(job, 10, 4, persisted=1) == ""
    assert verify_checkpoint(job.step(10)) == []


def test_file_that_the_system_refuses_to_extend_is_not_saved(job: SnapshotJob) -> None:
    """The operating system refuses, in the real process."""
    job.put_snapshot(step=10, snapshot=4)
    log = drain(job.arena, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1300, 1300))")
    assert "r000002-rank-00000.distcp: cannot be written: File too large" in log
    assert_nothing_is_left(job.step(10))


def test_a_storage_that_is_away(job: SnapshotJob) -> None:
    path_of(job.checkpoints).rename(path_of(job.checkpoints).with_name("away"))
    path_of(job.checkpoints).write_text("no directory")
    with writer_thread(job.arena):
        assert "claims: cannot be listed: Not a directory" in persist_next(job, 10, 4, failures=1)
        path_of(job.checkpoints).unlink()
        path_of(job.checkpoints).with_name("away").rename(path_of(job.checkpoints))
        persist_next(job, 20, 5, failures=1, persisted=1)
    assert committed_steps(job.checkpoints / "main") == [20]


def test_failed_removal_is_reported(job: SnapshotJob) -> None:
    def fail(action: str, path: str) -> None:
        if MANIFEST in path and action == "write":
            raise CheckpointError("disk full")
        if path.endswith("-metadata") and action == "remove":
            raise CheckpointError("not permitted")

    with writer_thread(job.arena, fail):
        assert persist_next(job, 10, 4, failures=1) == "step 10: not saved: disk full; not permitted"
    assert is_unfinished(job.step(10))


def test_removed_directory_gets_the_next_checkpoint(job: SnapshotJob) -> None:
    """Its branch is written again: a checkpoint without a branch would never be found."""
    branch = read_branch(job.checkpoints, "main")
    with writer_thread(job.arena):
        persist_next(job, 10, 4, persisted=1)
        shutil.rmtree(path_of(job.checkpoints))
        persist_next(job, 20, 5, persisted=2)
    assert committed_steps(job.checkpoints / "main") == [20]
    assert read_branch(job.checkpoints, "main") == branch
    assert [candidate.step for candidate in candidates(job.checkpoints)] == [20]


def test_our_own_bug_ends_one_write_and_not_the_writer(job: SnapshotJob, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(action: str, path: str) -> None:
        if f"step-000000010/{MANIFEST}" in path:
            raise ZeroDivisionError("a bug")

    with writer_thread(job.arena, fail):
        assert persist_next(job, 10, 4, failures=1) == "step 10: not saved: ZeroDivisionError: a bug"
        persist_next(job, 20, 5, failures=1, persisted=1)
    assert "Traceback" in capfd.readouterr().err
    assert committed_steps(job.checkpoints / "main") == [20]


# Invalid arenas


def test_a_slot_that_a_worker_uses_again_too_early(job: SnapshotJob) -> None:
    def reuse(action: str, path: str) -> None:
        if action == "append" and path.endswith("step-000000010/r000002-rank-00001.distcp"):
            header = job.arena.slot(1, 0)
            content = bytearray(header.read_bytes())
            content[8 * 130] += 2
            # in place, as a worker does, not another file
            with header.open("r+b") as file:
                file.write(content)

    with writer_thread(job.arena, reuse):
        problem = persist_next(job, 10, 4, failures=1)
        assert "rank-00001.slot-0: sealed, with snapshot 6 of step 10, while snapshot 4" in problem
    assert_nothing_is_left(job.step(10))


def test_a_slot_that_a_newer_round_goes_on_from_is_no_failure(
    job: SnapshotJob, capfd: pytest.CaptureFixture[str]
) -> None:
    """A start that fetched snapshots from peers takes over the old ones while a writer reads them."""
    before, after = SealedSnapshot(10, 2, 4), SealedSnapshot(10, 3, 6)
    slots = [job.arena.slot(rank, 0) for rank in (0, 1)]

    def take_over(action: str, path: str) -> None:
        if action == "append" and path.endswith("step-000000010/r000002-rank-00001.distcp"):
            adopt(before, after, slots, [], Persist.PENDING)

    with writer_thread(job.arena, take_over):
        job.put_snapshot(step=10, snapshot=4)
        wake_writer(job.arena)
        heard: list[str] = []

        def is_reported() -> bool:
            heard.append(capfd.readouterr().err)
            return "\n" in "".join(heard)

        wait_until(is_reported, "the writer's output")
        log = "".join(heard)
        assert "step 10: left to a newer round: " in log
        assert "slot-0: while snapshot 4 of step 10 was read from it, round 3 of the job took the slot over" in log
        put_description(job.arena, 3, described_by((0, 1), 3))
        job.change_plans(round=3)
        wake_writer(job.arena)
        assert wait_for(job.arena, persisted=1).num_failures == 0
    assert job.persist_words() == {10: {Persist.DONE}}
    assert verify_checkpoint(job.step(10)) == []


def corrupt_digest(job: SnapshotJob) -> None:
    plan = RankPlan.read(job.arena.rank_plan(1))
    RankPlan(1, plan.image_bytes, bytes(32), plan.items).write(job.arena.rank_plan(1))


OF_ROUND_3 = WritingMark(3, "demo", 1_790_000_000.0)
OBSTACLES: dict[str, tuple[Callable[[SnapshotJob], Any], str]] = {
    "another layout": (
        corrupt_digest,
        r"rank-00001\.slot-0: its plan is not the one in .*plan-00001\.json; it belongs to a layout that",
    ),
    "no plan": (lambda job: job.arena.rank_plan(1).unlink(), r"plan-00001\.json: does not exist"),
    "a damaged plan": (lambda job: job.arena.rank_plan(1).write_text("{"), r"plan-00001\.json: not JSON"),
    "no metadata": (
        lambda job: job.arena.metadata(2).unlink(), r"metadata-r000002\.bin: cannot be read: No such file",
    ),
    "no branch": (
        lambda job: (job.checkpoints / "main" / "BRANCH").remove(), "main/BRANCH is missing, so main is no branch",
    ),
    "no tokenizer": (
        lambda job: job.change_plans(tokenizer="/no/gone.json"), "gone.json: cannot be read: No such file",
    ),
    "a newer round has committed the step": (
        lambda job: put_checkpoint(job.checkpoints / "main", 10, round=3, files={}),
        "committed by round 3, and round 2 is older",
    ),
    "a newer round writes the step": (
        lambda job: OF_ROUND_3.write(job.step(10)), "round 3 is writing this checkpoint, and round 2 is older",
    ),
    "a complete step is damaged": (
        lambda job: put_checkpoint(job.checkpoints / "main", 10), "is committed but damaged: remove it",
    ),
    "a complete step of another job": (
        lambda job: put_checkpoint(job.checkpoints / "main", 10, job="other", files={}), "job='other', expected 'demo'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OBSTACLES)
def test_obstacle_is_reported_and_what_was_there_stays(job: SnapshotJob, name: str) -> None:
    prepare, message = OBSTACLES[name]
    prepare(job)
    before = tree(path_of(job.step(10)))
    with writer_thread(job.arena):
        problem = persist_next(job, 10, 4, failures=1)
    assert re.search(message, problem)
    if before:
        assert tree(path_of(job.step(10))) == before
    else:
        assert_nothing_is_left(job.step(10))


def test_unsealed_snapshot_is_given_up_when_workers_are_gone(job: SnapshotJob) -> None:
    put_slot(job.arena, 0, step=10, snapshot=4)
    put_slot(job.arena, 1, step=10, snapshot=4, state=SlotState.WRITING)
    job.change_plans(keep_arena_s=1000.0)
    with writer_thread(job.arena, has_worker=False):
        problem = wait_for(job.arena, failures=1).last_error
    assert problem == "step 10: not saved: not sealed by rank 1, which cannot seal it any more"
    assert_nothing_is_left(job.step(10))


def test_slot_removed_before_the_commit_does_not_matter(job: SnapshotJob) -> None:
    def remove(action: str, path: str) -> None:
        if action == "write" and path.endswith("COMMIT"):
            job.arena.slot(1, 0).unlink(missing_ok=True)

    with writer_thread(job.arena, remove):
        persist_next(job, 10, 4, persisted=1)
    assert verify_checkpoint(job.step(10)) == []


def test_slot_that_cannot_be_marked_is_not_retried_for_ever(job: SnapshotJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise CheckpointError("read-only")

    monkeypatch.setattr(writer, "write_persist", refuse)
    with writer_thread(job.arena):
        persist_next(job, 10, 4, persisted=1)
        monkeypatch.undo()
        persist_next(job, 20, 5, persisted=2)
    assert job.persist_words() == {10: {Persist.PENDING}, 20: {Persist.DONE}}


# Other rounds


@pytest.mark.parametrize("moment", ["host-r000002-00000.done", "r000002-metadata", "r000002-index.json"])
def test_a_newer_round_comes_in_between(job: SnapshotJob, moment: str) -> None:
    """An older round that checks again gives up, and leaves the newer round's files."""
    come = threading.Event()

    def come_in(action: str, path: str) -> None:
        if action == "write" and path.endswith(moment) and not come.is_set():
            come.set()
            OF_ROUND_3.write(job.step(10))
            (job.step(10) / "r000003-metadata").write(b"of round 3")

    with writer_thread(job.arena, come_in):
        problem = persist_next(job, 10, 4, failures=1)
    assert "round 3 is writing this checkpoint" in problem
    assert not is_committed(job.step(10))
    assert sorted(tree(path_of(job.step(10)))) == ["WRITING", "r000003-metadata"]
    mark = WritingMark.read(job.step(10))
    assert mark is not None
    assert mark.round == 3


def test_files_of_an_older_round_are_removed_with_the_commit(job: SnapshotJob) -> None:
    WritingMark(1, "demo", 1_790_000_000.0).write(job.step(10))
    for name in (
        "r000001-rank-00000.distcp",
        "host-r000001-00000.done",
        "r000001-metadata",
        "r000001-index.json",
        ".metadata",
    ):
        (job.step(10) / name).write(b"old")
    with writer_thread(job.arena):
        persist_next(job, 10, 4, persisted=1)
    assert verify_checkpoint(job.step(10)) == []
    assert len(tree(path_of(job.step(10)))) == 7


def test_file_in_a_manifest_is_never_a_leftover(job: SnapshotJob) -> None:
    content = b"written by an older round"
    files = {"r000001-rank-00000.distcp": FileEntry(len(content), "sha256:" + "0a" * 32)}
    directory = put_checkpoint(job.checkpoints / "main", 10, files=files)
    for name in (*files, "r000001-rank-00001.distcp"):
        (directory / name).write(content)
    with writer_thread(job.arena):
        persist_next(job, 10, 4, persisted=1)
    assert sorted(tree(path_of(directory))) == ["COMMIT", *files, manifest_path(path_of(directory)).name]


def test_consecutive_failures_are_counted_until_a_save(job: SnapshotJob) -> None:
    failing = FailingStorage("write", "WRITING")
    with writer_thread(job.arena, failing):
        persist_next(job, 10, 4, failures=1)
        first = wait_for(job.arena, failures=1)
        persist_next(job, 20, 5, failures=2)
        second = wait_for(job.arena, failures=2)
    assert (first.num_failed, second.num_failed) == (1, 2)
    assert first.failing_unix_s == second.failing_unix_s is not None
    # A restarted writer counts its writes from 0, and continues to count consecutive failures.
    with writer_thread(job.arena, failing):
        persist_next(job, 30, 6, failures=1)
        third = wait_for(job.arena, failures=1)
        assert (third.num_failed, third.failing_unix_s) == (3, first.failing_unix_s)
        failing.is_on = False
        persist_next(job, 40, 7, failures=1, persisted=1)
        saved = wait_for(job.arena, failures=1, persisted=1)
    assert (saved.num_failed, saved.failing_unix_s) == (0, None)
    assert saved.persisted_unix_s is not None
