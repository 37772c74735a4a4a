"""Hosts are lost with their memory: the job continues from copies on peers, without reading storage.

Every rank is a separate host here: tp 1, pp 2, dp 2, so ranks 0 and 3 hold each other's copies, and so do ranks 1 and
2.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from megatrain.arena.directory import Arena
from megatrain.arena.plans import WriterStatus
from megatrain.arena.sealed import sealed_by_rank
from megatrain.arena.slot_file import SlotReader
from megatrain.arena.slot_layout import Persist
from megatrain.checkpoint import peer_fetch
from megatrain.checkpoint.continuation import TrainingProgress
from megatrain.checkpoint.job import JobCheckpoints
from megatrain.checkpoint.snapshots import SnapshotTimes
from megatrain.config.config import Config
from megatrain.contracts.errors import CommunicationError
from tests.dist.restarts import (
    assert_goes_on_as_if_never_stopped,
    place,
    remove_memory,
    source_of,
    step_place,
    steps_that_are_whole,
    wait_for_commit,
    wait_for_the_end_of_writers,
)
from tests.dist.training_jobs import SHALLOW, Run, Tables, TrainingJobs
from tests.helpers.faults import WriterFault, WriterFaults
from tests.helpers.rank_pool import RankError, RankPool
from tests.helpers.rank_protocol import RankContext
from tests.helpers.training_case import CaseOrders, RankRecord, make_config, on_layout, train_on_rank
from tests.helpers.waiting import wait_until

LAYOUT = on_layout(1, 2, 2)
NUM_HOSTS = 4
KEEPERS = {0: 3, 1: 2, 2: 1, 3: 0}
OPTIONS: Tables = {
    **SHALLOW,
    "train": {"steps": 5},
    "checkpoint": {"interval": 2, "keep_arena_s": 60.0, "has_peer_copies": True},
}
STRAIGHT: Tables = {"checkpoint": {"interval": 0, "has_peer_copies": False, "keep_arena_s": 0.0}}
ALL_HOSTS = CaseOrders(num_hosts=NUM_HOSTS)


def host_arena(run_directory: Path, host: int) -> Arena:
    (root,) = (run_directory / f"host-{host}").glob("megatrain-arena*")
    return Arena(root)


def has_copy(run_directory: Path, keeper: int, step: int) -> bool:
    copies = sealed_by_rank(host_arena(run_directory, keeper), is_copy=True)
    return any(one.step == step for one in copies.get(KEEPERS[keeper], []))


def train_and_copy(context: RankContext, config: Config, orders: CaseOrders) -> RankRecord:
    """Run as a worker that continues after a snapshot when the copy that it keeps is complete."""
    take, run_directory = JobCheckpoints.take, Path(config.job.run_directory)

    def take_and_wait(checkpoints: JobCheckpoints, progress: TrainingProgress) -> SnapshotTimes:
        times = take(checkpoints, progress)
        wait_until(lambda: has_copy(run_directory, context.rank, progress.step), "the copy")
        return times

    with mock.patch.object(JobCheckpoints, "take", take_and_wait):
        return train_on_rank(context, config, orders)


def train_but_fetch_half(context: RankContext, config: Config, orders: CaseOrders) -> RankRecord:
    """Run as a worker whose connections break off while it fetches."""

    def receive_half(*_: object) -> None:
        raise CommunicationError("10.0.0.1:4242: the peer closed the connection")

    with mock.patch.object(peer_fetch, "receive_contents", receive_half):
        return train_on_rank(context, config, orders)


def config_of(run_directory: Path, train_data: Tables) -> Config:
    return make_config(train_data, OPTIONS, LAYOUT, place(run_directory))


def crash_after_copies(rank_pool: RankPool, config: Config, orders: CaseOrders) -> None:
    """Run until all copies of the snapshot of step 2 are complete, and a rank dies."""
    with pytest.raises(RankError, match="exit code 7"):
        rank_pool.run(train_and_copy, NUM_HOSTS, config, replace(orders, die_at=(1, 3)))


def wait_for_storage(run_directory: Path) -> None:
    """Wait until storage has step 2, and no writer has work left."""
    wait_for_commit(run_directory, 2)
    wait_until(lambda: persist_words(run_directory) == {Persist.DONE}, "writers without work")


def lose(run_directory: Path, hosts: tuple[int, ...]) -> None:
    """End the processes of these hosts, and remove their memory."""
    for host in hosts:
        os.kill(WriterStatus.read(host_arena(run_directory, host).writer_status).pid, signal.SIGKILL)
        remove_memory(run_directory / f"host-{host}")


def persist_words(run_directory: Path) -> set[Persist]:
    """Return the persist states of the sealed snapshots of all hosts."""
    found = set()
    for rank in range(NUM_HOSTS):
        arena = host_arena(run_directory, rank)
        for file in arena.slots():
            if not file.is_copy:
                with SlotReader(file.path) as slot:
                    words = slot.words()
                found |= {words.persist} if words.step == 2 else set()
    return found


def straight_run(jobs: TrainingJobs, train_data: Tables) -> Run:
    return jobs.remembered(make_config(train_data, OPTIONS, LAYOUT, STRAIGHT))


@pytest.mark.slow
def test_job_survives_loss_of_a_dp_group_and_its_storage(
    rank_pool: RankPool, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    """Rank 0, which decides, is among the lost ranks."""
    config = config_of(tmp_path, train_data)
    crash_after_copies(rank_pool, config, ALL_HOSTS)
    wait_for_storage(tmp_path)
    lose(tmp_path, (0, 1))
    shutil.rmtree(step_place(tmp_path, 2))
    assert_goes_on_from_memory(jobs, config, train_data, num_lost=2)


@pytest.mark.slow
def test_job_survives_loss_of_a_pp_group_that_writes(
    rank_pool: RankPool, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    """The remaining writers wait for files that never arrive, until a newer snapshot exists."""
    run_directory, faults = tmp_path / "run", tmp_path / "faults"
    for host in range(NUM_HOSTS):
        held = WriterFault("append", "step-000000002/r000000-rank-00003.distcp", is_held=True)
        ordered = WriterFaults.order(faults / f"host-{host}", *([held] if host == 3 else []))
    config = config_of(run_directory, train_data)
    crash_after_copies(rank_pool, config, replace(ALL_HOSTS, writer_faults=str(faults)))
    wait_until(ordered.reached(0).exists, "the writer of host 3")
    lose(run_directory, (1, 3))
    assert_goes_on_from_memory(jobs, config, train_data, num_lost=2)


def assert_goes_on_from_memory(jobs: TrainingJobs, config: Config, train_data: Tables, num_lost: int) -> None:
    run_directory = Path(config.job.run_directory)
    after = jobs.run(config, ALL_HOSTS, worker=train_and_copy)
    place_text = f"step 2 from the memory of {NUM_HOSTS - num_lost} hosts ({num_lost} of 4 ranks from a copy at a peer)"
    assert source_of(after) == place_text
    assert any(re.fullmatch(r"resumed .* \(0 B read by rank 0\)", note) for note in after.ranks[0].notes)
    assert_goes_on_as_if_never_stopped(after, straight_run(jobs, train_data), 2)
    # Snapshots that were only in memory have reached storage too, even if writers were lost.
    assert steps_that_are_whole(run_directory / "checkpoints") == [2, 4]
    wait_for_the_end_of_writers(run_directory)


@pytest.mark.slow
def test_snapshot_without_a_peer_copy_comes_from_storage(
    rank_pool: RankPool, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    config = config_of(tmp_path, train_data)
    crash_after_copies(rank_pool, config, ALL_HOSTS)
    wait_for_storage(tmp_path)
    lose(tmp_path, (2,))
    records = rank_pool.run(train_but_fetch_half, NUM_HOSTS, config, ALL_HOSTS)
    notes = records[0].notes
    (warning,) = (note for note in notes if note.startswith("WARNING"))
    assert "step 2 is in memory, but a peer's copy of it did not arrive: rank 2: 10.0.0.1:4242: the peer" in warning
    assert any(re.match(r"resumed at step 2 from .*step-000000002 in ", note) for note in notes)
    assert [report.loss for report in records[0].steps] == straight_run(jobs, train_data).losses[2:]
    wait_for_the_end_of_writers(tmp_path)


def test_start_without_hosts_for_copies_is_refused(rank_pool: RankPool, train_data: Tables, tmp_path: Path) -> None:
    config = config_of(tmp_path, train_data)
    with pytest.raises(RankError, match=r"checkpoint\.has_peer_copies=true: .* on 2 hosts leaves no host outside"):
        rank_pool.run(train_on_rank, NUM_HOSTS, config, CaseOrders(num_hosts=2))
