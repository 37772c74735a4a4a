"""The writer process of a host: what it commits, in which order, and when it ends."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatrain.arena.directory import Arena, join_arena, wake_writer
from megatrain.arena.plans import HostPlan
from megatrain.arena.slot_layout import Persist
from megatrain.checkpoint.host_writer import start_writer
from megatrain.checkpoint.verification import verify_checkpoint
from megatrain.checkpoint.writer import main
from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.commit import committed_steps, is_committed
from megatrain.contracts.exit_codes import ExitCode
from megatrain.programs.background import NICENESS_VARIABLE
from tests.helpers.arena_snapshots import SnapshotJob, make_image, make_job
from tests.helpers.checkpoint_tree import manifest_path, path_of, put_checkpoint, tree
from tests.helpers.hooked_location import READS
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S, wait_until
from tests.helpers.writer_process import drain, is_alive, log_of, running_writer, wait_for, writer_thread

FILES = ["r000002-rank-00000.distcp", "r000002-rank-00001.distcp"]


@pytest.fixture
def job(tmp_path: Path) -> SnapshotJob:
    return make_job(tmp_path)


@pytest.fixture
def arena(job: SnapshotJob) -> Arena:
    return job.arena


# Committed data


def test_snapshot_without_the_index_of_its_round_is_not_saved(job: SnapshotJob, arena: Arena) -> None:
    index = arena.index(2).read_bytes()
    arena.index(2).unlink()
    with running_writer(arena):
        job.put_snapshot(step=10, snapshot=4)
        assert wake_writer(arena)
        assert str(arena.index(2)) in wait_for(arena, failures=1).last_error
        assert not is_committed(job.step(10))
        assert job.persist_words() == {10: {Persist.FAILED}}
        arena.index(2).write_bytes(index)
        job.put_snapshot(step=20, snapshot=5)
        assert wake_writer(arena)
        wait_for(arena, persisted=1, failures=1)
    assert verify_checkpoint(job.step(20), job="demo", branch="main") == []


def test_a_snapshot_becomes_a_checkpoint(job: SnapshotJob, arena: Arena, tmp_path: Path) -> None:
    (tmp_path / "my-tokenizer.json").write_text('{"model": 1}')
    job.change_plans(tokenizer=str(tmp_path / "my-tokenizer.json"))
    with running_writer(arena) as pid:
        first = wait_for(arena)
        assert (first.pid, first.branch, first.round, first.last_persisted_step) == (pid, "main", 2, None)
        assert start_writer(arena, log_of(arena)) is None
        job.put_snapshot(step=10, snapshot=4)
        assert wake_writer(arena)
        status = wait_for(arena, persisted=1)
        assert job.persist_words() == {10: {Persist.DONE}}
    directory = job.step(10)
    assert verify_checkpoint(directory, job="demo", branch="main") == []
    files = tree(path_of(directory))
    assert sorted(files) == [
        ".metadata",
        "COMMIT",
        "r000002-index.json",
        manifest_path(path_of(job.step(10))).name,
        "r000002-metadata",
        *FILES,
        "r000002-tokenizer.json",
    ]
    for rank, name in enumerate(FILES):
        image = make_image(rank, 4)
        assert files[name][: len(image)] == image
    manifest = read_manifest(directory)
    plan = HostPlan.read(arena.host_plan)
    assert (manifest.step, manifest.round, manifest.branch, manifest.job) == (10, 2, "main", "demo")
    assert (manifest.consumed_samples, manifest.consumed_tokens) == (320, 81920)
    assert (manifest.num_updates, manifest.num_skipped, manifest.has_optimizer) == (9, 1, True)
    assert (manifest.mesh, manifest.versions, manifest.data) == (
        plan.manifest.mesh, plan.manifest.versions, plan.manifest.data,
    )  # fmt: skip
    assert (manifest.config, manifest.config_hash) == ({"model": {"hidden_size": 64}}, "abc123")
    assert sorted(manifest.files) == ["r000002-index.json", "r000002-metadata", *FILES, "r000002-tokenizer.json"]
    assert (status.last_persisted_step, status.last_error, status.num_failures) == (10, "", 0)
    assert status.last_write_bytes == sum(len(files[name]) for name in FILES)
    assert status.last_write_s > 0
    assert "step 10 of main: committed by round 2" in log_of(arena).read_text()


@pytest.mark.slow
def test_a_checkpoint_behind_a_url(job: SnapshotJob, arena: Arena) -> None:
    job.change_plans(checkpoints=f"file://{job.checkpoints}")
    job.put_snapshot(step=10, snapshot=4)
    drain(arena)
    assert verify_checkpoint(job.step(10)) == []


@pytest.mark.slow
def test_the_oldest_snapshot_comes_first(job: SnapshotJob, arena: Arena) -> None:
    job.put_snapshot(step=20, snapshot=5)
    job.put_snapshot(step=10, snapshot=4)
    log = drain(arena)
    assert log.index("step 10 of main: committed") < log.index("step 20 of main: committed")
    assert committed_steps(job.checkpoints / "main") == [10, 20]
    for step in (10, 20):
        assert verify_checkpoint(job.step(step)) == []
    assert not arena.root.exists()


def test_files_are_written_in_a_crash_safe_order(job: SnapshotJob, arena: Arena) -> None:
    done: list[str] = []

    def note(action: str, path: str) -> None:
        if action not in (*READS, "append"):
            done.append(f"{action} {path.rpartition('/')[2]}")
        if path.endswith("COMMIT") and action == "write":
            assert job.persist_words() == {10: {Persist.PENDING}}

    with writer_thread(arena, note):
        job.put_snapshot(step=10, snapshot=4)
        wake_writer(arena)
        wait_for(arena, persisted=1)
    mark, manifest = "host-r000002-00000", manifest_path(path_of(job.step(10))).name
    assert done[:3] == ["write WRITING", f"remove {mark}.done", f"remove {mark}.failed"]
    assert sorted(done[3:7]) == [*(f"close {name}" for name in FILES), *(f"create {name}" for name in FILES)]
    assert done[7:] == [
        f"write {mark}.done", "write r000002-metadata", "write r000002-index.json", f"write {manifest}",
        "write COMMIT", "write .metadata", "remove WRITING", f"remove {mark}.done",
    ]  # fmt: skip


@pytest.mark.slow
def test_old_checkpoints_are_removed(job: SnapshotJob, arena: Arena) -> None:
    for step in (1, 2, 3):
        put_checkpoint(job.checkpoints / "main", step)
    job.change_plans(keep_last=2)
    job.put_snapshot(step=10, snapshot=4)
    log = drain(arena)
    assert committed_steps(job.checkpoints / "main") == [3, 10]
    assert "removed" in log


def test_a_step_that_is_complete_already_is_left_alone(job: SnapshotJob, arena: Arena) -> None:
    """The job was stopped at the step from which it had resumed."""
    job.put_snapshot(step=10, snapshot=4)
    with running_writer(arena):
        wait_for(arena, persisted=1)
        before = tree(path_of(job.checkpoints))
        job.change_plans(round=3)
        job.put_snapshot(step=10, snapshot=5, round_number=3)
        wake_writer(arena)
        wait_for(arena, persisted=2)
        assert tree(path_of(job.checkpoints)) == before
        assert job.persist_words() == {10: {Persist.DONE}}


def test_pending_snapshot_of_an_older_round_is_stored(job: SnapshotJob, arena: Arena) -> None:
    job.change_plans(round=3)
    job.put_snapshot(step=10, snapshot=4, round_number=2)
    drain(arena)
    directory = job.step(10)
    assert verify_checkpoint(directory) == []
    assert read_manifest(directory).round == 2


# Start and end


@pytest.mark.slow
def test_writer_has_the_lowest_priority(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NICENESS_VARIABLE)
    with running_writer(arena) as pid:
        wait_for(arena)
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
        assert os.sched_getscheduler(pid) == os.SCHED_BATCH
        assert os.getsid(pid) == pid
        assert len(os.sched_getaffinity(pid)) >= len(os.sched_getaffinity(0))


@pytest.mark.slow
def test_writer_started_by_hand_keeps_the_sessions_priority(arena: Arena) -> None:
    """The kernel weights a session as a whole if sched_autogroup is on; the shell's session must not change."""
    group = Path("/proc/self/autogroup")
    if not group.exists():
        pytest.skip("this kernel does not schedule by session")
    before = group.read_text()
    ended = subprocess.run([sys.executable, "-m", "megatrain.checkpoint.writer", str(arena.root)], timeout=DEADLINE_S)
    assert ended.returncode == 0
    assert group.read_text() == before


def test_writer_ends_when_its_workers_have_left_without_a_zombie(arena: Arena, tmp_path: Path) -> None:
    _, workers = join_arena(arena.root)
    pid = start_writer(arena, log_of(arena))
    assert pid is not None
    wait_for(arena)
    workers.release()
    wake_writer(arena)
    wait_until(lambda: not is_alive(pid), "the end of the writer")
    assert not arena.root.exists()


def test_arena_is_kept_for_a_while_and_longer_for_a_worker(job: SnapshotJob, arena: Arena) -> None:
    job.change_plans(keep_arena_s=1000.0)
    now, polls = [0.0], [0]

    def clock_s() -> float:
        polls[0] += 1
        return now[0]

    def poll() -> None:
        """Let the writer poll twice, so that one poll began after all earlier changes."""
        for _ in range(2):
            seen = polls[0]
            wake_writer(arena)
            wait_until(lambda seen=seen: polls[0] > seen, "a poll of the clock")  # type: ignore[misc]

    with writer_thread(arena, clock_s=clock_s, has_worker=False) as running:
        poll()
        now[0] = 999.0
        poll()
        _, workers = join_arena(arena.root)
        wake_writer(arena)
        wait_until(lambda: running.writer._idle_since is None, "a check of the worker")
        now[0] = 1001.0
        job.put_snapshot(step=10, snapshot=4)
        wake_writer(arena)
        wait_for(arena, persisted=1)
        workers.release()
        poll()
        now[0] = 2000.0
        poll()
        assert arena.root.exists()
        now[0] = 2002.0
        wake_writer(arena)
        running.join()
    assert not arena.root.exists()


@pytest.mark.slow
def test_second_writer_ends_without_an_error(job: SnapshotJob, arena: Arena) -> None:
    job.put_snapshot(step=10, snapshot=4)
    command = [sys.executable, "-m", "megatrain.checkpoint.writer", str(arena.root)]
    both = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    log = ""
    for process in both:
        log += process.communicate(timeout=DEADLINE_S)[1]
        assert process.returncode == 0
    assert log.count("step 10 of main: committed") == 1
    assert verify_checkpoint(job.step(10)) == []


def test_writer_asked_to_stop_completes_the_write_at_hand(job: SnapshotJob, arena: Arena) -> None:
    job.put_snapshot(step=10, snapshot=4)
    job.put_snapshot(step=20, snapshot=5)

    is_known = threading.Event()

    def ask(action: str, path: str) -> None:
        if path.endswith(FILES[0]):
            # The writer may be here before the test has received its message.
            assert is_known.wait(DEADLINE_S)
            running.writer.stop()

    _, workers = join_arena(arena.root)
    with workers, writer_thread(arena, ask) as running:
        is_known.set()
        running.join()
        persist = job.persist_words()
    assert committed_steps(job.checkpoints / "main") == [10]
    assert persist == {10: {Persist.DONE}, 20: {Persist.PENDING}}


def test_writer_ends_at_sigterm_and_ignores_sigint_and_sighup(job: SnapshotJob, arena: Arena) -> None:
    with running_writer(arena) as pid:
        wait_for(arena)
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
        job.put_snapshot(step=10, snapshot=4)
        wake_writer(arena)
        wait_for(arena, persisted=1)
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not is_alive(pid), "the end of the writer")
        assert arena.root.exists()


def test_a_writer_that_was_killed_is_started_again(job: SnapshotJob, arena: Arena) -> None:
    with running_writer(arena) as first:
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not is_alive(first), "the end of the writer")
        job.put_snapshot(step=10, snapshot=4)
        with running_writer(arena) as second:
            assert second != first
            wait_for(arena, persisted=1)
    assert verify_checkpoint(job.step(10)) == []


def test_without_workers_and_plan_there_is_nothing_to_keep(job: SnapshotJob, arena: Arena) -> None:
    job.put_snapshot(step=10, snapshot=4)
    arena.host_plan.unlink()
    drain(arena)
    assert not arena.root.exists()


def test_with_a_damaged_plan_everything_is_kept(job: SnapshotJob, arena: Arena) -> None:
    job.put_snapshot(step=10, snapshot=4)
    arena.host_plan.write_text("{")
    assert "host.json: not JSON" in drain(arena)
    assert job.persist_words() == {10: {Persist.PENDING}}


@pytest.mark.parametrize("is_made_again", [False, True])
def test_writer_of_a_removed_arena_ends(job: SnapshotJob, arena: Arena, is_made_again: bool) -> None:
    job.change_plans(keep_arena_s=1000.0)
    with writer_thread(arena, has_worker=False) as running:
        wait_for(arena)
        gone = Arena(arena.root.with_name("gone"))
        arena.root.rename(gone.root)
        if is_made_again:
            join_arena(arena.root)[1].release()
        wake_writer(gone)
        running.join()
    assert arena.root.exists() == is_made_again


def test_arena_may_be_removed_while_the_writer_reads_it(
    job: SnapshotJob, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.change_plans(keep_arena_s=1000.0)
    read_plan, reads = HostPlan.read, itertools.count()

    def remove_first(path: Path) -> HostPlan:
        if next(reads) == 1:
            arena.root.rename(arena.root.with_name("gone"))
        return read_plan(path)

    monkeypatch.setattr(HostPlan, "read", remove_first)
    with writer_thread(arena, has_worker=False) as running:
        running.join()
    assert next(reads) == 2


def test_copies_for_other_hosts_are_left_alone(job: SnapshotJob, arena: Arena) -> None:
    job.put_snapshot(step=30, snapshot=6)
    for rank in (0, 1):
        arena.slot(rank, 0).rename(arena.copy(rank, 0))
    job.put_snapshot(step=10, snapshot=5)
    drain(arena)
    assert committed_steps(job.checkpoints / "main") == [10]


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == ExitCode.USAGE
    assert "ARENA_DIRECTORY" in capsys.readouterr().err
    assert main([str(tmp_path / "gone")]) == ExitCode.OK
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file")]) == ExitCode.CHECKPOINT


@pytest.mark.slow(kept=["full"])
@pytest.mark.parametrize("name", ["gone/log", "full"])
def test_checkpoints_are_saved_though_the_log_is_not_writable(
    job: SnapshotJob, arena: Arena, tmp_path: Path, name: str
) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    job.put_snapshot(step=10, snapshot=4)
    put_checkpoint(job.checkpoints / "main", 20)
    job.put_snapshot(step=20, snapshot=5)
    _, workers = join_arena(arena.root)
    with workers:
        pid = start_writer(arena, tmp_path / name)
        assert pid is not None
        # Failures are logged too, but not there.
        assert "committed but damaged" in wait_for(arena, persisted=1, failures=1).last_error
        assert job.persist_words() == {10: {Persist.DONE}, 20: {Persist.FAILED}}
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not is_alive(pid), "the end of the writer")


def test_writer_loads_no_torch() -> None:
    script = "import sys, megatrain.checkpoint.writer; print({'torch', 'numpy', 'fsspec'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "set()"
