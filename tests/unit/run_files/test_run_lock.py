"""The writers of a run directory: one job, and only the newest round of that job."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatrain.checkpoint_format.claims import Claims, JobRound
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.contracts.errors import ConfigError, FencedError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.run_files.run_directory import RunDirectory
from megatrain.run_files.run_lock import RunLock, checkpoints_locked
from tests.helpers.checkpoint_tree import crash_at

OLD, NEW, NEWEST = (JobRound("demo (etcd cluster 7)", number) for number in (1, 2, 12))
OTHER_JOB = JobRound("other (etcd cluster 7)", 9)
PROCESS = rf"process {os.getpid()} on {re.escape(socket.gethostname())}"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.create()
    return run


# Without a launcher


def test_a_run_directory_has_one_job_at_a_time(run: RunDirectory) -> None:
    with (
        run.locked(),
        pytest.raises(ConfigError, match=rf"run': {PROCESS} is training in it; wait for it or"),
        run.locked(),
    ):
        pass
    with run.locked() as run_lock:
        run_lock.check()
        assert run_lock.lock.note == ""


def test_a_checkpoint_directory_of_its_own_has_one_job_at_a_time(tmp_path: Path) -> None:
    """Two runs may name the same place although each has a separate run directory."""
    place = str(tmp_path / "a" / "checkpoints")
    refused = rf"^1. checkpoint.directory='{place}': {PROCESS} is training in it; .* another checkpoint"
    with checkpoints_locked(place), pytest.raises(ConfigError, match=refused), checkpoints_locked(place):
        pass
    with checkpoints_locked(place), checkpoints_locked(f"{place}2"):
        pass


def test_unlockable_directory_is_not_held() -> None:
    """The run's own directory, a URL, and unreachable storage, which other code reports."""
    for place in ("", "memory://bucket/run", "/proc/nowhere/run"):
        with checkpoints_locked(place) as first, checkpoints_locked(place) as second:
            assert (first, second) == (None, None), place


# Rounds of one job


def locked_by(run: RunDirectory, stack: ExitStack, *rounds: JobRound) -> list[RunLock]:
    return [stack.enter_context(run.locked(one)) for one in rounds]


def test_round_takes_a_higher_number_only_after_its_own_claim(tmp_path: Path) -> None:
    """Checkpoints from before there were claims may have higher numbers, which are known only when they are read."""
    claims = Claims(LocalLocation(tmp_path))
    first = claims.take(OLD)
    assert claims.take(OLD, 13, own=first.content()).number == 13
    with pytest.raises(FencedError, match="round 1 of demo"):
        claims.take(OLD, 14, own=first.content())


def test_a_newer_round_takes_over_from_one_that_is_frozen(run: RunDirectory) -> None:
    """The older round has the lock as long as its process exists, and it exists."""
    with ExitStack() as stack:
        old, new = locked_by(run, stack, OLD, NEW)
        assert "frozen or cut off and still has the lock; this round takes over" in new.lock.note
        new.check()
        says = rf"claims/00000002: {PROCESS}, round 2 of demo .* writes to the run now; .* round 1 .* is left over"
        with pytest.raises(FencedError, match=says) as caught:
            old.check()
        assert caught.value.exit_code is ExitCode.COORDINATION
        assert run.holder() is not None
        assert "round 2" in str(run.holder())
        assert run.was_held_here()


def test_lock_goes_to_the_newer_round_after_the_frozen_one(run: RunDirectory) -> None:
    frozen, current = ExitStack(), ExitStack()
    with current:
        with frozen:
            locked_by(run, frozen, OLD)
            (new,) = locked_by(run, current, NEW)
        assert run.holder() is None
        new.check()
        assert "round 2" in str(run.holder())
    assert run.holder() is None


@pytest.mark.parametrize("late", [OLD, NEW])
def test_late_round_is_fenced_and_changes_nothing(run: RunDirectory, late: JobRound) -> None:
    """It was delayed between its start and its claim. It makes no difference that the newer round has just ended."""
    with run.locked(NEW) as new:
        before = run.holder()
        is_late = rf"the holder is {PROCESS}, round 2 of demo .*, and round .* is not newer"
        with pytest.raises(FencedError, match=is_late), run.locked(late):
            pass
        new.check()
        assert run.holder() == before
    with pytest.raises(FencedError), run.locked(late):
        pass
    with run.locked(NEWEST):
        pass


def test_round_overtaken_twice_is_fenced(run: RunDirectory) -> None:
    with ExitStack() as stack:
        old, new, newest = locked_by(run, stack, OLD, NEW, NEWEST)
        newest.check()
        for run_lock in (old, new):
            with pytest.raises(FencedError, match=r"round 12 of demo .* writes to the run now"):
                run_lock.check()


def test_two_rounds_that_claim_at_once(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older round has found the directory free, and is delayed before its claim."""
    link, stack = os.link, ExitStack()

    def held_up(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        locked_by(run, stack, NEW)
        link(source, target)

    monkeypatch.setattr(os, "link", held_up)
    with stack, pytest.raises(FencedError, match="round 1 is not newer"), run.locked(OLD):
        pass
    assert [path.name for path in (run.root / "claims").iterdir()] == ["00000001"]


def test_rounds_of_another_etcd_count_from_one(run: RunDirectory) -> None:
    with run.locked(NEWEST):
        pass
    with run.locked(JobRound("demo (etcd cluster 8)", 1)) as run_lock:
        run_lock.check()
        assert run_lock.claim is not None
        claims, own = run_lock.claim
        assert claims.newest() == own


def test_lock_of_another_job_is_not_a_configuration_error(run: RunDirectory, tmp_path: Path) -> None:
    place = str(tmp_path / "elsewhere")
    with run.locked(OTHER_JOB) as other, checkpoints_locked(place, OTHER_JOB):
        for attempt in (run.locked(OLD), checkpoints_locked(place, OLD)):
            with pytest.raises(FencedError, match=r"round 9 of other .* is training in it; wait for it or stop it"):
                attempt.__enter__()
        other.check()
    with run.locked(OLD), checkpoints_locked(place, OLD), checkpoints_locked(place, NEW) as lock:
        assert lock is not None
        assert "this round takes over" in lock.note


# File systems


@pytest.mark.parametrize(("number", "job_round"), [(errno.ENOLCK, None), (errno.ENOTSUP, OLD), (errno.ENOSYS, OLD)])
def test_file_system_without_locks_is_reported(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, number: int, job_round: JobRound | None
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with run.locked(job_round) as run_lock:
        run_lock.check()
    says = rf"^WARNING: {run.root}/lock cannot be locked \(.*\): the file system has no locks, so nothing keeps another"
    assert re.search(says, run_lock.lock.note)


def test_unreachable_run_directory_fences_no_round(run: RunDirectory) -> None:
    with run.locked(OLD) as run_lock:
        run.root.rename(run.root.with_name("away"))
        run.root.write_text("no directory")
        run_lock.check()
        assert run.root.read_text() == "no directory"


def test_a_damaged_claim_is_reported(run: RunDirectory) -> None:
    (run.root / "claims").mkdir()
    (run.root / "claims" / "00000003").write_text("{")
    with (
        pytest.raises(ConfigError, match=r"claims/00000003: not JSON .*; remove it if no job is running"),
        run.locked(OLD),
    ):
        pass


def test_round_killed_in_its_claim_does_not_block_the_next(tmp_path: Path) -> None:
    """Killed before each of its changes of the directory."""
    number, is_killed = 0, True
    while is_killed:
        run = RunDirectory(tmp_path / str(number))
        run.create()
        preparation = (
            "from pathlib import Path\nfrom megatrain.run_files.run_directory import RunDirectory\n"
            "from megatrain.run_files.run_lock import JobRound\n"
            f"run, own = RunDirectory(Path({str(run.root)!r})), JobRound({OLD.counter!r}, {OLD.number})"
        )
        is_killed = crash_at(number, preparation, "with run.locked(own): pass")
        with run.locked(NEW) as run_lock:
            run_lock.check()
        number += 1
    assert number > 3
