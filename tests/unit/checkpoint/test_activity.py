"""The locks of its run directory and arenas show whether a job is running; on other machines there are only
indications."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.arena.directory import join_arena
from megatrain.arena.locks import hold_exclusively
from megatrain.checkpoint.activity import Activity, find_job
from megatrain.checkpoint.write_marks import WritingMark
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.url_location import open_location
from megatrain.run_files.run_directory import RunDirectory
from tests.helpers.arena_snapshots import host_plan, make_arena, put_slot
from tests.helpers.checkpoint_tree import go_back, put_checkpoint, put_main

NOTHING = Activity((), (), frozenset(), is_branch_known=True)


@pytest.fixture
def checkpoints(tmp_path: Path) -> LocalLocation:
    """A run directory whose job went back from main to another branch long ago."""
    place = LocalLocation(RunDirectory(tmp_path / "run").checkpoints)
    config = {"checkpoint": {"arena_directory": str(tmp_path / "arenas")}, "train": {"steps": 100}}
    put_main(place)
    (tmp_path / "arenas").mkdir()
    for step in (10, 20):
        put_checkpoint(place / "main", step, config=config, written_unix_s=1e9 + step)
    go_back(place, 20, "a spike")
    return place


def save(checkpoints: Location, step: int, age_s: float, **config: Any) -> None:
    put_checkpoint(
        checkpoints / "branch-0002", step, config={"train": {"steps": 100}, **config},
        written_unix_s=time.time() - age_s,
    )  # fmt: skip


def begin(checkpoints: Location, branch: str, step: int, age_s: float) -> None:
    WritingMark(3, "demo", time.time() - age_s).write(checkpoints / branch / f"step-{step:09d}")


def test_idle_directory_shows_no_activity(checkpoints: Location) -> None:
    assert find_job(checkpoints) == NOTHING


def test_holder_of_the_run_directory_is_running(checkpoints: LocalLocation, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    assert run.holder() is None
    for place in (checkpoints, open_location(f"file://{checkpoints}")):
        with run.locked():
            found = find_job(place)
        (sign,) = found.running
        assert sign == f"process {os.getpid()} on {socket.gethostname()} is training in {run.root}"
        assert found.may_write_to("main"), "any branch may be the job's"
        assert found.may_write_to("branch-0002")
        assert find_job(place) == NOTHING


def test_query_does_not_block_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)
    with run.locked():
        pass
    with (tmp_path / "lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        monkeypatch.setattr("megatrain.run_files.run_lock.time.sleep", lambda _: fcntl.flock(file, fcntl.LOCK_UN))
        with run.locked():
            assert find_job(LocalLocation(run.checkpoints)).running, "it has waited, and then begun"


def test_workers_in_an_arena_are_running(checkpoints: LocalLocation, tmp_path: Path) -> None:
    arena = make_arena(tmp_path / "arenas/megatrain-arena1.demo.main.0123abcd", host_plan(str(checkpoints)))
    make_arena(tmp_path / "arenas/megatrain-arena1.broken.main.0123abcd", host_plan("x")).host_plan.write_bytes(b"")
    other = make_arena(tmp_path / "arenas/megatrain-arena1.other.main.0123abcd", host_plan(str(tmp_path / "other")))
    (tmp_path / "arenas/megatrain-arena1.unused").mkdir()
    _, elsewhere = join_arena(other.root)
    with elsewhere:
        assert find_job(checkpoints) == NOTHING
        _, worker = join_arena(arena.root)
        with worker:
            found = find_job(LocalLocation(checkpoints.path / ".." / "checkpoints"))
    assert found.running == ("workers of job demo are running on this host and save to main",)
    assert found.may_write_to("main")
    assert not found.may_write_to("branch-0002")


@pytest.mark.parametrize("has_writer", [False, True])
def test_a_writer_that_still_has_something_to_write(
    has_writer: bool, checkpoints: LocalLocation, tmp_path: Path
) -> None:
    arena = make_arena(tmp_path / "arenas/megatrain-arena1.demo.main.0123abcd", host_plan(str(checkpoints), ranks=(0,)))
    lock = hold_exclusively(arena.writer_lock) if has_writer else None
    assert find_job(checkpoints) == NOTHING
    put_slot(arena, 0, step=30, snapshot=1)
    found = find_job(checkpoints)
    assert found.running == ()
    assert found.branches == ({"main"} if has_writer else set())
    if lock is not None:
        lock.release()


@pytest.mark.parametrize(
    ("make", "trace"),
    [
        (lambda place: begin(place, "branch-0002", 30, 5.0), "step 30 of branch-0002 was begun 5 s ago and is not"),
        (lambda place: begin(place, "branch-0002", 30, 5000.0), None),
        (
            lambda place: save(place, 30, 90.0),
            "step 30 of branch-0002 was saved 90 s ago, and the next save is not overdue",
        ),
        (lambda place: save(place, 30, 5000.0), None),
        (lambda place: save(place, 100, 5.0), None),
        (lambda place: [save(place, 30, 1400.0), save(place, 40, 700.0)], "step 40 of branch-0002 was saved 12 min"),
        (lambda place: [save(place, 30, 250.0), save(place, 40, 200.0)], None),
    ],
)
def test_traces_of_a_job_on_another_host(
    make: Callable[[Location], None], trace: str | None, checkpoints: LocalLocation, tmp_path: Path
) -> None:
    make(checkpoints)
    found = find_job(checkpoints)
    if trace is None:
        assert found == NOTHING
        return
    assert found.running == ()
    assert found.traces[0].startswith(trace)
    assert found.branches == {"branch-0002"}

    with RunDirectory(tmp_path / "run").locked():
        pass
    assert find_job(checkpoints) == NOTHING, "the last training process here was on this host, and is gone"


def test_damaged_checkpoints_and_configurations_give_no_activity(checkpoints: LocalLocation) -> None:
    save(checkpoints, 30, 5.0, checkpoint={"arena_directory": 3}, runtime=[], job={"run_directory": None})
    save(checkpoints, 40, 4.0, train=None)
    (checkpoints / "branch-0002/step-000000050/WRITING").write(b"{")
    (checkpoints / "branch-0002/step-000000060/COMMIT").write(b"{")
    assert find_job(checkpoints) == NOTHING
