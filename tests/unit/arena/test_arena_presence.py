"""The locks of an arena, the wake-up of its writer, and its removal, which needs both locks."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatrain.arena import directory, locks
from megatrain.arena.directory import Arena, arena_path, create_arena, join_arena, remove_arena, wake_writer
from megatrain.arena.locks import WakeReader, create_wake, hold_exclusively, hold_shared, is_held
from megatrain.contracts.errors import CheckpointError
from tests.helpers.checkpoint_tree import crash_at
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S, wait_until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return arena_path(tmp_path, "demo", "main", "/runs/demo/checkpoints")


@contextmanager
def other_process(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run a Python process until the end of the block; it has printed one line when the block begins."""
    with subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


HOLD = """
import sys
from pathlib import Path
from megatrain.arena.directory import join_arena
from megatrain.arena.locks import hold_exclusively
arena, workers = join_arena(Path(sys.argv[1]))
writer = hold_exclusively(arena.writer_lock)
print("holds both" if writer else "another writes", flush=True)
sys.stdin.read()
"""


# Locks


def test_workers_share_their_lock_and_the_writer_has_its_own(path: Path) -> None:
    arena, lock = join_arena(path)
    assert is_held(arena.workers_lock)
    _, second = join_arena(path)
    lock.release()
    lock.release()
    assert is_held(arena.workers_lock)
    second.release()
    assert not is_held(arena.workers_lock)
    assert not is_held(arena.writer_lock)
    writer = hold_exclusively(arena.writer_lock)
    assert writer is not None
    assert is_held(arena.writer_lock)
    assert hold_exclusively(arena.writer_lock) is None
    assert not is_held(arena.workers_lock)
    writer.release()
    assert hold_exclusively(arena.writer_lock) is not None


def test_locks_end_with_their_process(path: Path) -> None:
    arena = create_arena(path)
    with other_process(HOLD, path):
        assert is_held(arena.workers_lock)
        assert is_held(arena.writer_lock)
        assert hold_exclusively(arena.writer_lock) is None
    assert not is_held(arena.workers_lock)
    assert not is_held(arena.writer_lock)


@pytest.mark.parametrize("use", [hold_exclusively, is_held])
def test_query_does_not_count_as_a_holder(
    path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], Any]
) -> None:
    """A query takes the lock for a moment: it must neither be mistaken for a writer nor keep one out."""
    arena = create_arena(path)
    requester = os.open(arena.writer_lock, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(requester, fcntl.LOCK_EX)
        pauses: list[float] = []

        def be_done(pause_s: float) -> None:
            pauses.append(pause_s)
            fcntl.flock(requester, fcntl.LOCK_UN)

        monkeypatch.setattr(locks.time, "sleep", be_done)
        found = use(arena.writer_lock)
        assert len(pauses) == 1
        assert found is False if use is is_held else found is not None
    finally:
        os.close(requester)


def test_missing_lock_is_not_held_and_a_link_is_refused(tmp_path: Path) -> None:
    assert not is_held(tmp_path / "gone")
    for use in (is_held, hold_exclusively, hold_shared):
        assert not use(tmp_path / "gone" / "lock"), use
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    for use in (is_held, hold_exclusively, hold_shared):
        with pytest.raises(CheckpointError, match="link: the lock cannot be opened: Too many levels of symbolic links"):
            use(tmp_path / "link")
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (
            errno.ENOLCK,
            r"workers\.lock cannot be locked \(No locks available\): .* no file locks, .* need them; name an",
        ),
        (
            errno.ENOSYS,
            r"lock cannot be locked \(Function not implemented\): .*another checkpoint\.arena_directory, such",
        ),
        (errno.EIO, r"workers\.lock: the lock cannot be taken: Input/output error$"),
    ],
    ids=["ENOLCK", "ENOSYS", "EIO"],
)
def test_file_system_without_locks_holds_no_arena(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    arena, lock = join_arena(path)
    lock.release()

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    num_open = len(os.listdir("/proc/self/fd"))
    uses: list[Callable[[Path], object]] = [is_held, hold_exclusively, hold_shared, lambda _: join_arena(path)]
    for use in uses:
        with pytest.raises(CheckpointError, match=says):
            use(arena.workers_lock)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_lock_on_a_removed_file_is_not_granted(tmp_path: Path) -> None:
    """The holder of a lock removes its file while another waits: the other then locks a file without a name."""
    path = tmp_path / "lock"
    holder = hold_exclusively(path)
    assert holder is not None
    found: list[Any] = []
    waiter = threading.Thread(target=lambda: found.append(hold_shared(path)))
    waiter.start()
    try:
        wait_until(lambda: num_waiting(path) == 1, "a process that waits for the lock")
        path.unlink()
    finally:
        holder.release()
        waiter.join()
    assert found == [None]
    path.write_text("")
    again = hold_shared(path)
    assert again is not None
    again.release()


def num_waiting(path: Path) -> int:
    """Return the number of processes that wait for a lock, by /proc/locks; 1 on a system without that file."""
    locks = Path("/proc/locks")
    if not locks.exists():
        return 1
    inode = str(path.stat().st_ino)
    return sum(1 for line in locks.read_text().splitlines() if "->" in line and f":{inode} " in line)


# Removal


def test_arena_in_use_is_not_removed(path: Path) -> None:
    arena, lock = join_arena(path)
    arena.host_plan.write_text("{}")
    assert not remove_arena(path)
    lock.release()
    writer = hold_exclusively(arena.writer_lock)
    assert writer is not None
    assert not remove_arena(path)
    writer.release()
    assert arena.host_plan.exists()
    assert remove_arena(path)
    assert not path.exists()
    assert remove_arena(path)


def test_a_writer_removes_its_own_arena(path: Path) -> None:
    arena, workers = join_arena(path)
    for name in ("rank-00000.slot-0", "status.json", ".status.json.0123abcd.tmp"):
        (arena.root / name).write_text("")
    writer = hold_exclusively(arena.writer_lock)
    assert writer is not None
    assert not remove_arena(path, writer)
    assert hold_exclusively(arena.writer_lock) is None
    workers.release()
    assert remove_arena(path, writer)
    assert not path.exists()


def test_entry_that_is_not_a_file_is_not_removed(path: Path) -> None:
    arena = create_arena(path)
    (path / "more").mkdir()
    (path / "more" / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"{path}/more: cannot be removed: "):
        remove_arena(path)
    assert (path / "more" / "file").exists()
    assert not is_held(arena.workers_lock)


def test_links_in_an_arena_are_removed_and_not_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("")
    create_arena(path)
    (path / "rank-00000.slot-0").symlink_to(tmp_path / "precious")
    assert remove_arena(path)
    assert (tmp_path / "precious").exists()


REMOVE = "from pathlib import Path; from megatrain.arena.directory import remove_arena"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_interrupted_removal_is_finished_by_the_next(path: Path, number: int) -> None:
    arena, lock = join_arena(path)
    for slot in range(2):
        arena.slot(0, slot).write_text("")
    lock.release()
    crash_at(number, REMOVE, f"remove_arena(Path({str(path)!r}))")
    if path.exists():
        # The workers' lock is removed last: a joining worker waits until the removal is over.
        assert arena.workers_lock.exists() or list(path.iterdir()) == []
        arena, lock = join_arena(path)
        assert not remove_arena(path)
        lock.release()
    assert remove_arena(path)
    assert not path.exists()


def test_worker_that_joins_during_a_removal_keeps_the_arena(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_arena(path)
    remove_directory = Path.rmdir
    joined: list[Any] = []

    def join_first(directory: Path) -> None:
        joined.append(join_arena(path))
        remove_directory(directory)

    monkeypatch.setattr(Path, "rmdir", join_first)
    assert remove_arena(path)
    ((arena, lock),) = joined
    assert sorted(file.name for file in path.iterdir()) == ["wake", "workers.lock"]
    assert is_held(arena.workers_lock)
    lock.release()


def test_worker_that_joins_a_removed_arena_makes_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_directory, hold = Path.mkdir, hold_shared
    moments = ["made by another and gone", "gone before the lock", "removed under the lock"]

    def make(directory: Path, mode: int) -> None:
        if moments[0].startswith("made"):
            moments.pop(0)
            raise FileExistsError
        make_directory(directory, mode=mode)

    def hold_what_goes(lock_path: Path) -> Any:
        if moments[0].startswith("gone"):
            path.rmdir()
        elif moments[0].startswith("removed"):
            assert remove_arena(path)
        moments.pop(0)
        return hold(lock_path)

    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(directory, "hold_shared", hold_what_goes)
    moments.append("undisturbed")
    arena, lock = join_arena(path)
    assert moments == []
    assert is_held(arena.workers_lock)
    lock.release()


CHURN = """
import os, sys
from pathlib import Path
from megatrain.arena.directory import join_arena, remove_arena
print("ready", flush=True)
sys.stdin.readline()
path, role, num_rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for number in range(num_rounds):
    if role == "remover":
        remove_arena(path)
        continue
    arena, lock = join_arena(path)
    file = arena.slot(os.getpid(), 0)
    file.write_text(str(number))
    # no process may remove files of an arena while this process holds the lock
    for _ in range(3):
        assert file.read_text() == str(number)
        assert arena.workers_lock.exists() and arena.wake.exists()
    lock.release()
"""


@pytest.mark.slow
def test_workers_join_while_others_remove(path: Path) -> None:
    roles = (("worker", 200), ("worker", 200), ("remover", 500), ("remover", 500))
    with ExitStack() as stack:
        processes = [stack.enter_context(other_process(CHURN, path, *role)) for role in roles]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        assert [process.wait(DEADLINE_S) for process in processes] == [0] * 4
    assert remove_arena(path)


# Waking


def test_a_writer_is_woken(path: Path) -> None:
    arena, lock = join_arena(path)
    assert not wake_writer(arena)
    with WakeReader(arena.wake) as reader:
        assert not reader.wait(0)
        for _ in range(3):
            assert wake_writer(arena)
        assert reader.wait(DEADLINE_S)
        # Three consecutive wake-ups count as one: the writer then reads everything.
        assert not reader.wait(0)
        waker = threading.Timer(0.05, wake_writer, [arena])
        waker.start()
        assert reader.wait(DEADLINE_S)
        waker.join()
    assert not wake_writer(arena)
    lock.release()


def test_full_fifo_does_not_block_the_waker(path: Path) -> None:
    arena, lock = join_arena(path)
    with WakeReader(arena.wake) as reader:
        fcntl.fcntl(reader._file, fcntl.F_SETPIPE_SZ, 4096)
        assert all(wake_writer(arena) for _ in range(5000))
        assert reader.wait(0)
        assert not reader.wait(0)
    lock.release()


def test_waking_never_raises(path: Path, tmp_path: Path) -> None:
    arena = create_arena(path)
    assert not wake_writer(arena)
    arena.wake.write_text("precious")
    assert not wake_writer(arena)
    assert arena.wake.read_text() == "precious"
    with pytest.raises(CheckpointError, match="wake: is not a FIFO"):
        create_wake(arena.wake)
    assert not wake_writer(Arena(tmp_path / "gone"))
    with pytest.raises(CheckpointError, match="the FIFO cannot be opened"):
        WakeReader(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="the FIFO cannot be created"):
        create_wake(tmp_path / "gone" / "wake")
