"""The arena's directory: ours alone, found again, joined and left in any order, removed only when nobody is in it."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts import arena as arena_module
from megatrain.contracts import arena_locks
from megatrain.contracts.arena import (
    Arena,
    SealedSnapshot,
    SlotFile,
    arena_path,
    create_arena,
    join_arena,
    open_arena,
    remove_arena,
    sealed_by_rank,
    sealed_steps,
    wake_writer,
)
from megatrain.contracts.arena_layout import HEADER_BYTES, SlotHeader, SlotState, Word, encode_header
from megatrain.contracts.arena_locks import WakeReader, create_wake, hold_alone, hold_shared, is_held
from megatrain.contracts.errors import CheckpointError, MissingFileError
from tests.helpers.checkpoint_tree import crash_at
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import wait_until

DEADLINE_S = 50.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return arena_path(tmp_path, "demo", "main", "/runs/demo/checkpoints")


@contextmanager
def other_process(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run Python beside us until the end of the block; it has said one line when the block begins."""
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


JOIN = """
import sys
from pathlib import Path
from megatrain.contracts.arena import join_arena
arena, lock = join_arena(Path(sys.argv[1]))
print("in", flush=True)
sys.stdin.read()
"""
WRITE = """
import sys
from pathlib import Path
from megatrain.contracts.arena import open_arena
from megatrain.contracts.arena_locks import hold_alone
lock = hold_alone(open_arena(Path(sys.argv[1])).writer_lock)
print("writing" if lock else "another", flush=True)
sys.stdin.read()
"""


# Names


def test_names_are_those_that_were_agreed(path: Path) -> None:
    arena = Arena(path)
    assert path.name == "megatrain-arena1.demo.main.964080e6"
    names = (
        arena.slot(3, 0), arena.copy(7, 1), arena.host_plan, arena.rank_plan(3), arena.metadata(2),
        arena.writer_status, arena.wake, arena.writer_lock, arena.workers_lock,
    )  # fmt: skip
    assert [name.relative_to(path).as_posix() for name in names] == [
        "rank-00003.slot-0", "copy-00007.slot-1", "host.json", "plan-00003.json", "metadata-r000002.bin",
        "status.json", "wake", "writer.lock", "workers.lock",
    ]  # fmt: skip


def test_arenas_of_different_jobs_never_meet(tmp_path: Path) -> None:
    names = ["a", "a.b", "a/b", "../a", "", "a" * 300, "tr\u00e4um"]
    paths = {arena_path(tmp_path, job, branch, place) for job in names for branch in names for place in ("x", "y")}
    assert len(paths) == 2 * len(names) ** 2
    for path in paths:
        assert path.parent == tmp_path
        assert re.fullmatch(r"megatrain-arena1\.[\w-]+\.[\w-]+\.[0-9a-f]{8}", path.name, re.ASCII)


# Ours alone


def test_an_arena_is_made_and_found_again(path: Path) -> None:
    with pytest.raises(MissingFileError, match="there is no arena"):
        open_arena(path)
    for _ in range(2):
        assert create_arena(path) == open_arena(path) == Arena(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_the_mask_of_the_process_makes_no_difference(path: Path) -> None:
    for mask in (0, 0o077):
        before = os.umask(mask)
        try:
            arena, lock = join_arena(path)
            with lock:
                assert stat.S_IMODE(path.stat().st_mode) == 0o700
                for file in (arena.wake, arena.workers_lock):
                    assert stat.S_IMODE(file.stat().st_mode) == 0o600
        finally:
            os.umask(before)
        assert remove_arena(path)


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701, 0o705, 0o500])
def test_a_directory_that_others_may_use_is_refused(path: Path, mode: int) -> None:
    path.mkdir()
    path.chmod(mode)
    for use in (open_arena, create_arena, join_arena, remove_arena):
        with pytest.raises(CheckpointError, match=rf"{path}: has mode {mode:o}, expected 700; what is in it may be"):
            use(path)
    assert list(path.iterdir()) == []


def test_a_link_is_refused(path: Path, tmp_path: Path) -> None:
    victim = create_arena(tmp_path / "victim").root
    (victim / "file").write_text("")
    path.symlink_to(victim)
    for use in (open_arena, create_arena, join_arena, remove_arena):
        with pytest.raises(CheckpointError, match=r": is a symbolic link; .*name another checkpoint\.arena_directory"):
            use(path)
    assert [file.name for file in victim.iterdir()] == ["file"]


def test_a_file_is_refused(path: Path) -> None:
    path.write_text("")
    for use in (open_arena, create_arena, remove_arena):
        with pytest.raises(CheckpointError, match=": is no directory;"):
            use(path)


def test_a_directory_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_arena(path)
    ours = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: ours + 1)
    for use in (open_arena, create_arena, join_arena, remove_arena):
        with pytest.raises(CheckpointError, match=f"belongs to user {ours}, and this is user {ours + 1}"):
            use(path)


def test_a_place_where_anybody_may_replace_the_arena_is_refused(tmp_path: Path) -> None:
    open_place = tmp_path / "open"
    open_place.mkdir()
    open_place.chmod(0o777)
    with pytest.raises(CheckpointError, match=r"open: anybody may replace files in it \(mode 777, not sticky\)"):
        create_arena(open_place / "arena")
    open_place.chmod(0o1777)
    create_arena(open_place / "arena")


def test_an_arena_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone/arena: the arena cannot be made: No such file.*arena_directory"):
        create_arena(tmp_path / "gone" / "arena")
    with pytest.raises(CheckpointError, match="the arena cannot be made: File name too long"):
        join_arena(tmp_path / ("a" * 300))


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
    writer = hold_alone(arena.writer_lock)
    assert writer is not None
    assert is_held(arena.writer_lock)
    assert hold_alone(arena.writer_lock) is None
    assert not is_held(arena.workers_lock)
    writer.release()
    assert hold_alone(arena.writer_lock) is not None


def test_a_lock_goes_with_its_process(path: Path) -> None:
    arena = create_arena(path)
    with other_process(JOIN, path), other_process(WRITE, path):
        assert is_held(arena.workers_lock)
        assert hold_alone(arena.writer_lock) is None
        with other_process(WRITE, path) as second:
            assert second.poll() is None
    assert not is_held(arena.workers_lock)
    assert not is_held(arena.writer_lock)


@pytest.mark.parametrize("use", [hold_alone, is_held])
def test_whoever_only_asks_looks_like_no_holder(
    path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], Any]
) -> None:
    """To ask is to have the lock for a moment: that must neither look like a writer nor keep one out."""
    arena = create_arena(path)
    asker = os.open(arena.writer_lock, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(asker, fcntl.LOCK_EX)
        pauses: list[float] = []

        def be_done(pause_s: float) -> None:
            pauses.append(pause_s)
            fcntl.flock(asker, fcntl.LOCK_UN)

        monkeypatch.setattr(arena_locks.time, "sleep", be_done)
        found = use(arena.writer_lock)
        assert len(pauses) == 1
        assert found is False if use is is_held else found is not None
    finally:
        os.close(asker)


def test_a_lock_that_is_not_there_is_not_held(tmp_path: Path) -> None:
    assert not is_held(tmp_path / "gone")
    assert not is_held(tmp_path / "gone" / "lock")
    assert hold_alone(tmp_path / "gone" / "lock") is None
    assert hold_shared(tmp_path / "gone" / "lock") is None
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    for use in (is_held, hold_alone, hold_shared):
        with pytest.raises(CheckpointError, match="link: the lock cannot be opened: Too many levels of symbolic links"):
            use(tmp_path / "link")
    assert not (tmp_path / "victim").exists()


def test_a_lock_on_a_file_that_was_removed_counts_for_nothing(tmp_path: Path) -> None:
    """One waits for a lock while its holder removes the file: the lock it then gets is no longer of that name."""
    path = tmp_path / "lock"
    holder = hold_alone(path)
    assert holder is not None
    found: list[Any] = []
    waiter = threading.Thread(target=lambda: found.append(hold_shared(path)))
    waiter.start()
    try:
        wait_until(lambda: num_waiting(path) == 1, "somebody who waits for the lock", DEADLINE_S)
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
    """Return how many wait for a lock, as the kernel tells it; 1 where it does not tell."""
    locks = Path("/proc/locks")
    if not locks.exists():
        return 1
    inode = str(path.stat().st_ino)
    return sum(1 for line in locks.read_text().splitlines() if "->" in line and f":{inode} " in line)


# Removal


def test_an_arena_that_somebody_is_in_is_not_removed(path: Path) -> None:
    arena, lock = join_arena(path)
    arena.host_plan.write_text("{}")
    assert not remove_arena(path)
    lock.release()
    with other_process(WRITE, path):
        assert not remove_arena(path)
    assert arena.host_plan.exists()
    assert remove_arena(path)
    assert not path.exists()
    assert remove_arena(path)


def test_a_writer_removes_its_own_arena(path: Path) -> None:
    arena, workers = join_arena(path)
    for name in ("rank-00000.slot-0", "status.json", ".status.json.0123abcd.tmp"):
        (arena.root / name).write_text("")
    writer = hold_alone(arena.writer_lock)
    assert writer is not None
    assert not remove_arena(path, writer)
    assert hold_alone(arena.writer_lock) is None
    workers.release()
    assert remove_arena(path, writer)
    assert not path.exists()


def test_what_is_no_file_is_not_removed(path: Path) -> None:
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


REMOVE = "from pathlib import Path; from megatrain.contracts.arena import remove_arena"


@pytest.mark.parametrize("number", range(8))
def test_a_removal_that_is_cut_short_is_finished_by_the_next(path: Path, number: int) -> None:
    arena, lock = join_arena(path)
    for slot in range(2):
        arena.slot(0, slot).write_text("")
    lock.release()
    crash_at(number, REMOVE, f"remove_arena(Path({str(path)!r}))")
    if path.exists():
        # The workers' lock goes last: whoever wants to join waits until nothing more is taken away.
        assert arena.workers_lock.exists() or list(path.iterdir()) == []
        arena, lock = join_arena(path)
        assert not remove_arena(path)
        lock.release()
    assert remove_arena(path)
    assert not path.exists()


def test_who_joins_in_the_last_moment_of_a_removal_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_who_joins_while_the_directory_goes_makes_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(arena_module, "hold_shared", hold_what_goes)
    moments.append("undisturbed")
    arena, lock = join_arena(path)
    assert moments == []
    assert is_held(arena.workers_lock)
    lock.release()


CHURN = """
import os, sys
from pathlib import Path
from megatrain.contracts.arena import join_arena, remove_arena
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
    # Nobody may take away what is ours while we are in.
    for _ in range(3):
        assert file.read_text() == str(number)
        assert arena.workers_lock.exists() and arena.wake.exists()
    lock.release()
"""


def test_joining_and_removing_at_the_same_time(path: Path) -> None:
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
        # Three at once are one: it looks at everything then.
        assert not reader.wait(0)
        waker = threading.Timer(0.05, wake_writer, [arena])
        waker.start()
        assert reader.wait(DEADLINE_S)
        waker.join()
    assert not wake_writer(arena)
    lock.release()


def test_a_full_fifo_neither_blocks_nor_fails(path: Path) -> None:
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
    with pytest.raises(CheckpointError, match="wake: is no FIFO"):
        create_wake(arena.wake)
    assert not wake_writer(Arena(tmp_path / "gone"))
    with pytest.raises(CheckpointError, match="the FIFO cannot be opened"):
        WakeReader(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="the FIFO cannot be made"):
        create_wake(tmp_path / "gone" / "wake")


# What is sealed


def put_slot(path: Path, rank: int, slot: int, step: int, **changes: Any) -> None:
    values = {"state": SlotState.SEALED, "round": 2, "snapshot": step // 10, "header_rank": rank} | changes
    raw = bytearray(HEADER_BYTES + 8)
    header = encode_header(SlotHeader(values["header_rank"], slot, 2, 8, bytes(32)))
    raw[: len(header)] = header
    words = ((Word.STATE, values["state"]), (Word.STEP, step), (Word.SNAPSHOT, values["snapshot"]))
    for word, value in (*words, (Word.ROUND, values["round"])):
        struct.pack_into("<Q", raw, 8 * word, value)
    path.write_bytes(raw)


@pytest.fixture
def arena(path: Path) -> Arena:
    return create_arena(path)


Put = Callable[..., None]


@pytest.fixture
def put(arena: Arena) -> Put:
    """Return a function that puts slots of a rank at these steps, one a slot."""

    def put_slots(rank: int, *steps: int, **changes: Any) -> None:
        for slot, step in enumerate(steps):
            put_slot(arena.slot(rank, slot), rank, slot, step, **changes)

    return put_slots


def test_slots_and_copies_are_found_by_name(arena: Arena, put: Put) -> None:
    put(3, 10, 20)
    put_slot(arena.copy(100_000, 0), 100_000, 0, 10)
    for name in ("rank-3.slot-0", "rank-00003.slot-0.tmp", "x-00003.slot-0", "host.json", "rank-0000a.slot-0"):
        (arena.root / name).write_text("")
    assert arena.slots() == [
        SlotFile(arena.copy(100_000, 0), 100_000, 0, True),
        SlotFile(arena.slot(3, 0), 3, 0, False),
        SlotFile(arena.slot(3, 1), 3, 1, False),
    ]
    with pytest.raises(MissingFileError, match="the arena is gone"):
        Arena(arena.root / "gone").slots()


def test_a_step_counts_when_all_ranks_of_the_host_have_it(arena: Arena, put: Put) -> None:
    put(4, 20, 10)
    put(5, 20, 30)
    assert sealed_by_rank(arena) == {
        4: [SealedSnapshot(10, 2, 1), SealedSnapshot(20, 2, 2)],
        5: [SealedSnapshot(20, 2, 2), SealedSnapshot(30, 2, 3)],
    }
    assert sealed_steps(arena, [4, 5]) == [20]
    assert sealed_steps(arena, [4]) == [10, 20]
    assert sealed_steps(arena, [4, 5, 6]) == []
    assert sealed_steps(arena, [6, 4]) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"state": SlotState.WRITING},
        {"state": SlotState.EMPTY},
        {"round": 3},
        {"snapshot": 77},
        {"header_rank": 6},
        {"state": 9},
    ],
)
def test_a_slot_of_another_snapshot_or_none_does_not_count(arena: Arena, put: Put, changes: dict[str, int]) -> None:
    put(4, 20)
    put(5, 20, **changes)
    assert sealed_steps(arena, [4, 5]) == []
    assert sealed_steps(arena, [4]) == [20]


def test_a_damaged_slot_does_not_count(arena: Arena, put: Put) -> None:
    put(4, 20, 10)
    put(5, 20, 10)
    os.truncate(arena.slot(5, 0), HEADER_BYTES)
    assert sealed_steps(arena, [4, 5]) == [10]


def test_copies_are_kept_apart(arena: Arena, put: Put) -> None:
    put(4, 20)
    put_slot(arena.copy(9, 1), 9, 1, 30)
    assert sealed_by_rank(arena) == {4: [SealedSnapshot(20, 2, 2)]}
    assert sealed_by_rank(arena, is_copy=True) == {9: [SealedSnapshot(30, 2, 3)]}
