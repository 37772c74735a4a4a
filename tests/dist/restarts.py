"""Jobs that crash and restart: their directories, what the crash leaves, and checks of the restart."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from megatrain.arena.directory import Arena
from megatrain.arena.locks import is_held
from megatrain.checkpoint.verification import verify_checkpoint
from megatrain.checkpoint_format.checkpoint_names import step_directory_name
from megatrain.checkpoint_format.commit import committed_steps
from megatrain.checkpoint_format.local_location import LocalLocation
from tests.dist.training_jobs import Run, Tables, assert_states_bitwise
from tests.helpers.rank_pool import RankError, RankPool
from tests.helpers.training_case import CaseOrders, make_config, train_on_rank
from tests.helpers.waiting import wait_until


def place(run_directory: Path) -> Tables:
    return {"job": {"run_directory": str(run_directory)}}


def arenas(run_directory: Path) -> list[Path]:
    """Return the arenas of all hosts of a job."""
    return sorted([*run_directory.glob("megatrain-arena*"), *run_directory.glob("host-*/megatrain-arena*")])


def the_arena(run_directory: Path) -> Path:
    (arena,) = arenas(run_directory)
    return arena


def wait_for_the_end_of_writers(run_directory: Path) -> None:
    """Wait until the arenas are empty and no writer runs."""
    wait_until(lambda: not arenas(run_directory), "the end of the writers")


def step_place(run_directory: Path, step: int, branch: str = "main") -> Path:
    return run_directory / "checkpoints" / branch / step_directory_name(step)


def wait_for_commit(run_directory: Path, step: int) -> Path:
    """Return the checkpoint of a step as soon as it is committed."""
    directory = step_place(run_directory, step)
    wait_until(lambda: (directory / "COMMIT").exists(), f"the commit of step {step}")
    return directory


def crash(rank_pool: RankPool, *tables: Tables, orders: CaseOrders) -> None:
    """Run a job in which a rank is killed at a given point."""
    config = make_config(*tables)
    with pytest.raises(RankError, match=r"exit code (7|-9)"):
        rank_pool.run(train_on_rank, config.layout(None).world_size, config, orders)


def steps_that_are_whole(checkpoints: Path, branch: str = "main") -> list[int]:
    """Return the committed steps of a branch whose files are all unchanged. A step that retention removes meanwhile is
    not included."""
    directory = LocalLocation(checkpoints / branch)
    steps = []
    for step in committed_steps(directory):
        place = directory / step_directory_name(step)
        problems = verify_checkpoint(place, branch=branch)
        if step in committed_steps(directory):
            assert problems == [], problems
            steps.append(step)
    return steps


def source_of(run: Run) -> str:
    """Return the state that the run reports as its start: "step 2 from the memory of 1 host"; "" for a fresh start."""
    notes = [note for note in run.ranks[0].notes if note.startswith("resumed at ")]
    return notes[0].removeprefix("resumed at ").rpartition(" in ")[0] if notes else ""


def assert_goes_on_as_if_never_stopped(after: Run, straight: Run, step: int, until: int | None = None) -> None:
    """Check the steps of a run that has resumed at `step`. until: its last one, before the end of the other run."""
    assert [report.step for report in after.steps] == [report.step for report in straight.steps[step:until]]
    assert after.losses == straight.losses[step:until]
    assert after.grad_norms == straight.grad_norms[step:until]
    assert digests(after) == [of_rank[step:until] for of_rank in digests(straight)]
    if until is None:
        assert_states_bitwise(after.final_state, straight.final_state)


def digests(run: Run) -> list[Sequence[str]]:
    """Return the digests of each rank's state after each step."""
    return [record.digests for record in run.ranks]


def kill_writers(arena: Path) -> None:
    """Kill all writers of an arena, including one that is just starting."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(arena).encode() in command.read_bytes().split(b"\0"):
                os.kill(int(command.parent.name), signal.SIGKILL)
    wait_until(lambda: not is_held(Arena(arena).writer_lock), "the end of the writers")


def remove_memory(directory: Path) -> None:
    """Remove the arenas of a host, as if the host went down; a writer may add or remove files at the same time."""

    def is_gone() -> bool:
        shutil.rmtree(directory, ignore_errors=True)
        return not directory.exists()

    wait_until(is_gone, f"the end of {directory}")
