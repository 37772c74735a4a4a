"""Restarts after a crash: from host memory if every rank has its snapshot there, else from the newest intact
checkpoint."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatrain.checkpoint import job_restore
from megatrain.checkpoint.load import LoadReport
from megatrain.checkpoint_format.branches import list_branches
from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.config.config import Config
from tests.dist.restarts import (
    assert_goes_on_as_if_never_stopped,
    crash,
    kill_writers,
    place,
    remove_memory,
    the_arena,
    wait_for_commit,
    wait_for_the_end_of_writers,
)
from tests.dist.training_jobs import Tables, TrainingJobs, assert_states_bitwise
from tests.helpers.rank_pool import RankPool
from tests.helpers.rank_protocol import RankContext
from tests.helpers.training_case import CaseOrders, RankRecord, make_config, on_layout, train_on_rank
from tests.helpers.waiting import wait_until

# no two of four ranks save the same; replicas are in test_peer_copies.py
LAYOUT = on_layout(1, 4, 1)
STEPS, INTERVAL = 5, 2
OPTIONS: Tables = {"train": {"steps": STEPS}, "checkpoint": {"interval": INTERVAL}}
KEPT: Tables = {"checkpoint": {"interval": INTERVAL, "keep_arena_s": 60.0}}


@pytest.mark.slow
def test_job_continues_from_memory_after_a_crash(
    rank_pool: RankPool, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    tables = (train_data, OPTIONS, KEPT, LAYOUT, place(tmp_path))
    crash(rank_pool, *tables, orders=CaseOrders(die_at=(2, 3)))
    # Storage cannot be used: its files cannot be read.
    files = data_files(tmp_path, 2)
    for path in files:
        path.write_bytes(b"")

    after = jobs.run(make_config(*tables))
    straight = jobs.remembered(make_config(train_data, OPTIONS, LAYOUT, {"checkpoint": {"interval": 0}}))
    (note,) = (note for note in after.ranks[0].notes if note.startswith("resumed"))
    assert re.fullmatch(r"resumed at step 2 from the memory of 1 host in \d+\.\d\d s \(0 B read by rank 0\)", note)
    assert_goes_on_as_if_never_stopped(after, straight, 2)
    wait_for_the_end_of_writers(tmp_path)


def data_files(run_directory: Path, step: int) -> list[Path]:
    return sorted(wait_for_commit(run_directory, step).glob("*.distcp"))


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_skipped_by_all_ranks(
    jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    tables = (train_data, OPTIONS, LAYOUT, place(tmp_path))
    jobs.run(make_config(*tables, {"train": {"steps": 4}}))
    wait_for_the_end_of_writers(tmp_path)
    victim = data_files(tmp_path, 4)[3]
    # One of them detects it; more kinds of damage are in test_damaged_checkpoints.py.
    content = bytearray(victim.read_bytes())
    content[len(content) // 3] ^= 1
    victim.write_bytes(content)

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
    wait_for_the_end_of_writers(tmp_path)


def train_and_count(context: RankContext, config: Config, orders: CaseOrders) -> RankRecord:
    """Train, and write beside the run how many bytes this rank read from storage."""
    real = job_restore.load_state
    num_bytes = 0

    def counted(*args: Any) -> LoadReport:
        nonlocal num_bytes
        report = real(*args)
        num_bytes += report.bytes_read
        return report

    with mock.patch.object(job_restore, "load_state", counted):
        record = train_on_rank(context, config, orders)
    Path(config.job.run_directory, f"bytes-read-{context.rank}").write_text(str(num_bytes))
    return record


@pytest.mark.slow
@pytest.mark.parametrize("bucket_size", [20_000, 7_000])
def test_four_replicas_read_a_checkpoint_once(
    jobs: TrainingJobs, train_data: Tables, tmp_path: Path, bucket_size: int
) -> None:
    """With the same shards as the saved ones, and with other shards, where ranks need items that others read."""
    tables = (train_data, {"checkpoint": {"interval": 3}}, on_layout(1, 1, 4, 1), place(tmp_path))
    jobs.run(make_config(*tables, {"train": {"steps": 3}, "parallel": {"bucket_size": 20_000}}))
    wait_for_the_end_of_writers(tmp_path)
    cut: Tables = {"train": {"steps": 4}, "parallel": {"bucket_size": bucket_size}}
    after = jobs.run(make_config(*tables, cut), worker=train_and_count)
    assert [report.step for report in after.steps] == [4]
    read = sum(int(path.read_text()) for path in tmp_path.glob("bytes-read-*"))
    manifest = read_manifest(LocalLocation(tmp_path / "checkpoints" / "main" / "step-000000003"))
    size = sum(entry.size for entry in manifest.files.values())
    assert 0.95 * size < read <= 1.05 * size
    wait_for_the_end_of_writers(tmp_path)


@pytest.mark.slow
def test_later_changes_of_the_state_are_not_in_a_snapshot(
    jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    # A snapshot at every step, while the optimizer continues at once: storage must have each step's own state.
    constant: Tables = {"optimizer": {"lr_schedule": "constant", "lr_warmup_steps": 0}}
    every: Tables = {"checkpoint": {"interval": 1, "slots": 2}, "train": {"steps": 3}}
    jobs.run(make_config(train_data, LAYOUT, constant, every, place(tmp_path)))
    wait_for_the_end_of_writers(tmp_path)
    for step in (1, 2):
        reported: Tables = {"checkpoint": {"load": str(tmp_path / "checkpoints" / "main" / f"step-{step:09d}")}}
        loaded = jobs.run(make_config(train_data, LAYOUT, constant, reported, {"train": {"steps": step}}))
        straight = jobs.run(make_config(train_data, LAYOUT, constant, {"train": {"steps": step}}))
        assert_states_bitwise(loaded.initial_state, straight.final_state)


def remove(directory: Path) -> None:
    """Remove a directory in which a writer may still remove files after its commit."""

    def is_gone() -> bool:
        shutil.rmtree(directory, ignore_errors=True)
        return not directory.exists()

    wait_until(is_gone, f"{directory} to stay away")


@pytest.mark.slow
def test_a_run_that_was_removed_does_not_come_back_from_memory(
    rank_pool: RankPool, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    run_directory = tmp_path / "run"
    run_directory.mkdir()
    tables = (train_data, OPTIONS, KEPT, LAYOUT, place(run_directory))
    crash(rank_pool, *tables, orders=CaseOrders(die_at=(2, 3)))
    wait_for_commit(run_directory, 2)
    remove(run_directory / "checkpoints")
    memory = the_arena(run_directory)

    after = jobs.run(make_config(*tables, {"train": {"steps": 4}}))
    assert [report.step for report in after.steps] == [1, 2, 3, 4]
    assert memory.exists()
    kill_writers(memory)
    remove_memory(memory)
    wait_for_the_end_of_writers(run_directory)
