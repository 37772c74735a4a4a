"""Ranks on two hosts without shared memory: each host has an arena and a writer, and both write one checkpoint."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from megatrain.checkpoint import attach
from megatrain.checkpoint_format.checkpoint_files import manifest_location, read_manifest
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.config.config import Config
from tests.dist.restarts import (
    arenas,
    assert_goes_on_as_if_never_stopped,
    crash,
    kill_writers,
    place,
    remove_memory,
    source_of,
    step_place,
    steps_that_are_whole,
    wait_for_commit,
    wait_for_the_end_of_writers,
)
from tests.dist.training_jobs import Tables, TrainingJobs
from tests.helpers.faults import RankFault, WriterFault, WriterFaults
from tests.helpers.rank_pool import RankPool
from tests.helpers.rank_protocol import RankContext
from tests.helpers.training_case import CaseOrders, RankRecord, make_config, on_layout, train_on_rank

LAYOUT: Tables = {**on_layout(1, 1, 2), "model": {"num_layers": 1}}
STEPS = 7
OPTIONS: Tables = {"train": {"steps": STEPS}, "checkpoint": {"interval": 2, "keep_arena_s": 60.0}}


@pytest.mark.slow
def test_killed_writers_of_both_hosts_are_replaced(jobs: TrainingJobs, train_data: Tables, tmp_path: Path) -> None:
    coordinator = WriterFaults.order(
        tmp_path / "faults" / "host-0", WriterFault("write", r"step-000000004/r000000-manifest-.*\.json")
    )
    other = WriterFaults.order(
        tmp_path / "faults" / "host-1", WriterFault("append", "step-000000002/r000000-rank-00001.distcp", time=2)
    )
    run = tmp_path / "run"
    trained = jobs.run(
        make_config(train_data, OPTIONS, LAYOUT, place(run)),
        CaseOrders(num_hosts=2, writer_faults=str(tmp_path / "faults")),
    )
    straight = jobs.remembered(make_config(train_data, LAYOUT, {"train": {"steps": STEPS}}))
    assert_goes_on_as_if_never_stopped(trained, straight, 0)
    assert (coordinator.num_reached, other.num_reached) == (1, 1)
    assert not [note for note in trained.ranks[0].notes if "FAILED" in note]
    wait_for_the_end_of_writers(run)
    assert steps_that_are_whole(run / "checkpoints") == [2, 4, 6]
    for step in (2, 4, 6):
        directory = LocalLocation(step_place(run, step))
        files = [f"r000000-{name}" for name in ("index.json", "metadata", "rank-00000.distcp", "rank-00001.distcp")]
        assert sorted(read_manifest(directory).files) == files
        assert [entry.name for entry in directory.entries()] == sorted(
            [*files, ".metadata", "COMMIT", manifest_location(directory).name]
        )


def train_and_wait_less(context: RankContext, config: Config, orders: CaseOrders) -> RankRecord:
    """Run as a worker that considers a writer gone as soon as storage has not changed for a moment."""
    with mock.patch.object(attach, "_QUIET_S", 0.3):
        return train_on_rank(context, config, orders)


@pytest.mark.slow
@pytest.mark.parametrize("is_lost", [False, True], ids=["both-come-back", "one-is-lost"])
def test_all_ranks_of_both_hosts_killed(
    is_lost: bool, rank_pool: RankPool, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    """While one host writes its file of the newest snapshot; afterwards that host returns, or another one replaces
    it."""
    faults = WriterFaults.order(
        tmp_path / "faults" / "host-1",
        WriterFault("append", "step-000000004/r000000-rank-00001.distcp", time=2, is_held=True),
    )
    WriterFaults.order(tmp_path / "faults" / "host-0")
    run = tmp_path / "run"
    tables = (train_data, OPTIONS, LAYOUT, place(run))
    die = RankFault(None, 2, "call", when=str(faults.reached(0)))
    crash(rank_pool, *tables, orders=CaseOrders(num_hosts=2, fault=die, writer_faults=str(tmp_path / "faults")))
    wait_for_commit(run, 2)
    _, second = arenas(run)
    kill_writers(second)
    if is_lost:
        remove_memory(second)

    after = jobs.run(make_config(*tables), CaseOrders(num_hosts=2), worker=train_and_wait_less)

    step, source = (2, str(step_place(run, 2))) if is_lost else (4, "the memory of 2 hosts")
    assert source_of(after) == f"step {step} from {source}"
    straight = jobs.remembered(make_config(train_data, LAYOUT, {"train": {"steps": STEPS}}))
    assert_goes_on_as_if_never_stopped(after, straight, step)
    wait_for_the_end_of_writers(run)
    # Step 4 is pending in a round whose hosts may be gone: a newer pending step replaces it.
    assert steps_that_are_whole(run / "checkpoints") in ([2, 4, 6], [2, 6])
