"""Going on after a crash: from memory when every rank's is there, from storage when not, past what is damaged."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from megatrain.contracts.lineage import list_branches
from megatrain.contracts.location import LocalLocation
from tests.dist.training_jobs import Run, Tables, TrainingJobs, assert_states_bitwise
from tests.helpers.rank_pool import RankError, RankPool
from tests.helpers.training_case import Orders, make_config, on_layout, train_on_rank
from tests.helpers.waiting import wait_until

LAYOUT = on_layout(2, 2, 2, 2)
WORLD_SIZE, STEPS, INTERVAL = 8, 5, 2
OPTIONS: Tables = {"train": {"steps": STEPS}, "checkpoint": {"interval": INTERVAL}}
KEPT: Tables = {"checkpoint": {"interval": INTERVAL, "keep_arena_s": 60.0}}


def arenas(run_directory: Path) -> list[Path]:
    return list(run_directory.glob("megatrain-arena*"))


def place(run_directory: Path) -> Tables:
    return {"job": {"run_directory": str(run_directory)}}


def crash(rank_pool: RankPool, *tables: Tables, orders: Orders) -> None:
    with pytest.raises(RankError, match="exit code 7"):
        rank_pool.run(train_on_rank, WORLD_SIZE, make_config(*tables), orders, timeout_s=50.0)


def assert_goes_on_as_if_never_stopped(after: Run, straight: Run, step: int) -> None:
    assert after.losses == straight.losses[step:]
    assert after.grad_norms == straight.grad_norms[step:]
    assert_states_bitwise(after.final_state, straight.final_state)


def test_after_a_crash_of_workers_the_job_goes_on_from_memory(
    rank_pool: RankPool, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    tables = (train_data, OPTIONS, KEPT, LAYOUT, place(tmp_path))
    crash(rank_pool, *tables, orders=Orders(die_at=(5, 3)))
    # storage is of no use: what is there cannot be read
    files = wait_for_files(tmp_path / "checkpoints" / "main" / "step-000000002")
    for path in files:
        path.write_bytes(b"")

    after = jobs.run(make_config(*tables))
    straight = jobs.remembered(make_config(train_data, OPTIONS, LAYOUT, {"checkpoint": {"interval": 0}}))
    (note,) = (note for note in after.ranks[0].notes if note.startswith("resumed"))
    assert re.fullmatch(
        r"resumed at step 2 from the memory of 1 hosts in \d+\.\d\d s \(0 GB read by rank 0\)", note
    )
    assert_goes_on_as_if_never_stopped(after, straight, 2)
    wait_until(lambda: not arenas(tmp_path), "the end of the writer", 20.0)


def wait_for_files(directory: Path) -> list[Path]:
    wait_until(lambda: (directory / "COMMIT").exists(), "a committed checkpoint", 20.0)
    return sorted(directory.glob("*.distcp"))


def test_a_rank_that_dies_while_it_copies_spoils_that_snapshot_alone(
    rank_pool: RankPool, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    tables = (train_data, OPTIONS, KEPT, LAYOUT, place(tmp_path))
    crash(rank_pool, *tables, orders=Orders(dies_in_save=3, dies_at_save=2, diary=str(tmp_path)))

    after = jobs.run(make_config(*tables))
    straight = jobs.remembered(make_config(train_data, OPTIONS, LAYOUT, {"checkpoint": {"interval": 0}}))
    assert any(note.startswith("resumed at step 2 from the memory") for note in after.ranks[0].notes)
    assert_goes_on_as_if_never_stopped(after, straight, 2)
    wait_until(lambda: not arenas(tmp_path), "the end of the writer", 20.0)


@pytest.mark.parametrize("damage", ["flipped bit", "cut short", "missing file"])
def test_a_damaged_newest_checkpoint_is_skipped_by_name(
    damage: str, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    tables = (train_data, OPTIONS, LAYOUT, place(tmp_path))
    jobs.run(make_config(*tables, {"train": {"steps": 4}}))
    wait_until(lambda: not arenas(tmp_path), "nothing in memory to go on from", 20.0)
    victim = wait_for_files(tmp_path / "checkpoints" / "main" / "step-000000004")[3]
    if damage == "flipped bit":
        content = bytearray(victim.read_bytes())
        content[len(content) // 3] ^= 1
        victim.write_bytes(content)
    elif damage == "cut short":
        victim.write_bytes(victim.read_bytes()[:-1])
    else:
        victim.unlink()

    after = jobs.run(make_config(*tables, {"train": {"steps": 4}}))
    (warning,) = (note for note in after.ranks[0].notes if note.startswith("WARNING"))
    assert str(victim) in warning
    branches = list_branches(LocalLocation(tmp_path / "checkpoints"))
    assert [(branch.name, branch.parent, branch.parent_step) for branch in branches] == [
        ("branch-0002", "main", 2),
        ("main", "", None),
    ]
    assert [report.step for report in after.steps] == [3, 4]
    assert (tmp_path / "checkpoints" / "branch-0002" / "step-000000004" / "COMMIT").exists()
    wait_until(lambda: not arenas(tmp_path), "the end of the writer", 20.0)


def test_a_state_that_changes_right_after_a_snapshot_does_not_leak_into_it(
    jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    # a snapshot at every step, while the optimizer goes on at once: what storage has is each step's own state
    constant: Tables = {"optimizer": {"lr_schedule": "constant", "lr_warmup_steps": 0}}
    every: Tables = {"checkpoint": {"interval": 1, "slots": 2}, "train": {"steps": 3}}
    jobs.run(make_config(train_data, LAYOUT, constant, every, place(tmp_path)))
    wait_until(lambda: not arenas(tmp_path), "nothing in memory to go on from", 20.0)
    for step in (1, 2):
        told: Tables = {"checkpoint": {"load": str(tmp_path / "checkpoints" / "main" / f"step-{step:09d}")}}
        loaded = jobs.run(make_config(train_data, LAYOUT, constant, told, {"train": {"steps": step}}))
        straight = jobs.run(make_config(train_data, LAYOUT, constant, {"train": {"steps": step}}))
        assert_states_bitwise(loaded.initial_state, straight.final_state)


def test_a_run_that_was_removed_does_not_come_back_from_memory(
    rank_pool: RankPool, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    run_directory = tmp_path / "run"
    run_directory.mkdir()
    tables = (train_data, OPTIONS, {"checkpoint": {"interval": INTERVAL, "keep_arena_s": 3.0}}, LAYOUT)
    crash(rank_pool, *tables, place(run_directory), orders=Orders(die_at=(5, 3)))
    wait_for_files(run_directory / "checkpoints" / "main" / "step-000000002")
    shutil.rmtree(run_directory / "checkpoints")

    after = jobs.run(make_config(*tables, place(run_directory), {"train": {"steps": 4}}))
    assert [report.step for report in after.steps] == [1, 2, 3, 4]
    wait_until(lambda: not arenas(run_directory), "the end of both writers", 20.0)
