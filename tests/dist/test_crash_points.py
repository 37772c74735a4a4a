"""A rank or a writer is killed at each point of the protocol: committed checkpoints stay, and the job continues.

The protocol of a single writer is tested step by step in tests/unit/checkpoint/test_host_writer.py; here real ranks
train with it and are restarted.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.dist.restarts import (
    assert_goes_on_as_if_never_stopped,
    crash,
    kill_writers,
    place,
    source_of,
    step_place,
    steps_that_are_whole,
    the_arena,
    wait_for_commit,
    wait_for_the_end_of_writers,
)
from tests.dist.training_jobs import Run, Tables, TrainingJobs
from tests.helpers.faults import RankFault, WriterFault, WriterFaults
from tests.helpers.rank_pool import RankPool
from tests.helpers.training_case import CaseOrders, make_config, on_layout

LAYOUT: Tables = {**on_layout(1, 1, 2), "model": {"num_layers": 1}}
STEPS = 5
OPTIONS: Tables = {"train": {"steps": STEPS}, "checkpoint": {"interval": 2, "keep_arena_s": 60.0}}
MEMORY = "from the memory of 1 host"


def never_stopped(jobs: TrainingJobs, train_data: Tables) -> Run:
    return jobs.remembered(make_config(train_data, LAYOUT, {"train": {"steps": STEPS}}))


@pytest.mark.slow(kept=["copy"])
@pytest.mark.parametrize(
    "fault",
    [
        RankFault(1, 2, "begin"),
        RankFault(1, 2, "copy"),
        RankFault(1, 2, "agree"),
        # The other rank seals, but a step counts only if all ranks have it.
        RankFault(1, 2, "seal"),
        # No rank has notified the writer yet: it finds the step by itself.
        RankFault(0, 1, "call"),
    ],
    ids=lambda fault: fault.point,
)
def test_rank_killed_in_a_save(
    fault: RankFault, rank_pool: RankPool, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    tables = (train_data, OPTIONS, LAYOUT, place(tmp_path))
    crash(rank_pool, *tables, orders=CaseOrders(fault=fault))
    wait_for_commit(tmp_path, 2)
    assert not step_place(tmp_path, 4).exists()

    after = jobs.run(make_config(*tables))

    assert source_of(after) == f"step 2 {MEMORY}"
    assert_goes_on_as_if_never_stopped(after, never_stopped(jobs, train_data), 2)
    wait_for_the_end_of_writers(tmp_path)
    assert steps_that_are_whole(tmp_path / "checkpoints") == [2, 4]


@pytest.mark.slow
def test_rank_killed_before_its_first_seal(
    rank_pool: RankPool, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    """Another rank has sealed the snapshot, which waits to be written. It can never be complete, so no process waits
    for it."""
    tables = (train_data, OPTIONS, LAYOUT, place(tmp_path))
    crash(rank_pool, *tables, orders=CaseOrders(fault=RankFault(1, 1, "seal")))

    after = jobs.run(make_config(*tables))

    assert source_of(after) == ""
    assert_goes_on_as_if_never_stopped(after, never_stopped(jobs, train_data), 0)
    wait_for_the_end_of_writers(tmp_path)
    assert steps_that_are_whole(tmp_path / "checkpoints") == [2, 4]


@pytest.mark.slow
def test_rank_killed_while_copying_into_the_only_slot(
    rank_pool: RankPool, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    tables = (train_data, OPTIONS, LAYOUT, place(tmp_path))
    one_slot: Tables = {"checkpoint": {**OPTIONS["checkpoint"], "slots": 1}}
    crash(rank_pool, *tables, one_slot, orders=CaseOrders(fault=RankFault(1, 2, "copy")))
    # The slot became free for the second snapshot only when the first was in storage.
    assert steps_that_are_whole(tmp_path / "checkpoints") == [2]

    after = jobs.run(make_config(*tables, one_slot))

    assert source_of(after) == f"step 2 from {step_place(tmp_path, 2)}"
    assert_goes_on_as_if_never_stopped(after, never_stopped(jobs, train_data), 2)
    wait_for_the_end_of_writers(tmp_path)
    assert steps_that_are_whole(tmp_path / "checkpoints") == [2, 4]


@pytest.mark.slow
def test_rank_killed_while_slots_change(
    rank_pool: RankPool, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    """The writer is in the middle of a file of one snapshot when the copy of the next snapshot breaks off."""
    faults = WriterFaults.order(
        tmp_path / "faults" / "host-0",
        WriterFault("append", "step-000000002/r000000-rank-00001.distcp", time=2, is_held=True),
    )
    tables = (train_data, OPTIONS, LAYOUT, place(tmp_path))
    dies = RankFault(1, 2, "copy", when=str(faults.reached(0)))
    crash(rank_pool, *tables, orders=CaseOrders(fault=dies, writer_faults=str(tmp_path / "faults")))
    assert steps_that_are_whole(tmp_path / "checkpoints") == []
    faults.release(0)
    wait_for_commit(tmp_path, 2)
    assert steps_that_are_whole(tmp_path / "checkpoints") == [2]

    after = jobs.run(make_config(*tables))

    assert source_of(after) == f"step 2 {MEMORY}"
    assert_goes_on_as_if_never_stopped(after, never_stopped(jobs, train_data), 2)
    wait_for_the_end_of_writers(tmp_path)
    assert steps_that_are_whole(tmp_path / "checkpoints") == [2, 4]


@pytest.mark.slow
def test_all_processes_of_a_host_killed_at_once(
    rank_pool: RankPool, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    """In the middle of a file of the newest snapshot. Afterwards the host's memory is either intact or lost."""
    faults = WriterFaults.order(
        tmp_path / "faults" / "host-0",
        WriterFault("append", "step-000000004/r000000-rank-00001.distcp", time=2, is_held=True),
    )
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    die = RankFault(None, 2, "call", when=str(faults.reached(0)))
    crash(
        rank_pool, train_data, OPTIONS, LAYOUT, place(run),
        orders=CaseOrders(fault=die, writer_faults=str(tmp_path / "faults")),
    )  # fmt: skip
    kill_writers(the_arena(run))
    assert steps_that_are_whole(run / "checkpoints") == [2]
    assert (step_place(run, 4) / "r000000-rank-00001.distcp").stat().st_size > 0
    shutil.copytree(run / "checkpoints", elsewhere / "checkpoints")

    straight = never_stopped(jobs, train_data)
    for directory, step, source in (
        (run, 4, MEMORY),
        # as after a reboot
        (elsewhere, 2, f"from {step_place(elsewhere, 2)}"),
    ):
        after = jobs.run(make_config(train_data, OPTIONS, LAYOUT, place(directory)))
        assert source_of(after) == f"step {step} {source}"
        assert_goes_on_as_if_never_stopped(after, straight, step)
        wait_for_the_end_of_writers(directory)
        assert steps_that_are_whole(directory / "checkpoints") == [2, 4]


# Writers are killed one after another while the ranks train on.


def at_step(step: int, action: str, name: str, time: int = 1) -> WriterFault:
    return WriterFault(action, f"step-{step:09d}/{name}", time)


KILLS = [
    at_step(1, "write", "WRITING"),
    at_step(1, "append", "r000000-rank-00000.distcp"),
    # between the image and the trailer
    at_step(2, "append", "r000000-rank-00001.distcp", time=2),
    at_step(3, "close", "r000000-rank-00001.distcp"),
    at_step(3, "write", "host-r000000-00000.done"),
    at_step(4, "write", "r000000-metadata"),
    at_step(4, "write", "r000000-index.json"),
    at_step(5, "write", r"r000000-manifest-.*\.json"),
    at_step(6, "write", "COMMIT"),
    # One rank's slot is marked as free, the other rank's is not.
    WriterFault("persist", "word", time=2),
    at_step(8, "remove", "WRITING"),
    WriterFault("remove", r"step-\d+/COMMIT"),
    WriterFault("remove", r"step-\d+"),
]
AFTER_COMMIT = range(9, len(KILLS))
SAVES = 12
GOES_ON = 2
"""Steps after a restart: the second one has the update of the first."""


@pytest.mark.slow
def test_writers_killed_while_ranks_train(jobs: TrainingJobs, train_data: Tables, tmp_path: Path) -> None:
    faults = WriterFaults.order(tmp_path / "faults" / "host-0", *KILLS)
    # a learning rate that does not depend on the last step
    constant: Tables = {"train": {"steps": SAVES}, "optimizer": {"lr_schedule": "constant"}}
    every: Tables = {**constant, "checkpoint": {"interval": 1, "keep_last": 2}}
    run = tmp_path / "run"
    trained = jobs.run(
        make_config(train_data, LAYOUT, every, place(run)), CaseOrders(writer_faults=str(tmp_path / "faults"))
    )
    assert faults.num_reached == len(KILLS)

    # Training was not disturbed, every step reached storage, and steps beyond the retention are removed.
    straight = jobs.run(make_config(train_data, LAYOUT, constant))
    assert_goes_on_as_if_never_stopped(trained, straight, 0)
    assert not [note for note in trained.ranks[0].notes if "FAILED" in note]
    wait_for_the_end_of_writers(run)
    log = (run / "logs" / "checkpoint-writer.log").read_text()
    assert [log.count(f"step {step} of main: committed") for step in range(1, SAVES + 1)] == [1] * SAVES
    assert steps_that_are_whole(run / "checkpoints") == [SAVES - 1, SAVES]
    assert len(list((run / "checkpoints" / "main").iterdir())) == 3

    # If all processes had been killed at such a moment, the job would have resumed from the newest commit.
    newest = [0] * len(KILLS)
    for number in range(len(KILLS)):
        steps = steps_that_are_whole(faults.tree(number))
        newest[number] = max(steps, default=0)
        assert {newest[number] - 1, newest[number]} - {-1, 0} <= set(steps)
    assert newest[: AFTER_COMMIT.start] == [0, 0, 1, 2, 2, 3, 3, 4, 5]
    for number in (0, 1, 3, *AFTER_COMMIT):
        again = tmp_path / f"again-{number}"
        shutil.copytree(faults.tree(number), again / "checkpoints")
        until = min(newest[number] + GOES_ON, SAVES)
        after = jobs.run(make_config(train_data, LAYOUT, constant, {"train": {"steps": until}}, place(again)))
        source = f"step {newest[number]} from {step_place(again, newest[number])}" if newest[number] else ""
        assert source_of(after) == source
        assert_goes_on_as_if_never_stopped(after, straight, newest[number], until)


def test_writer_killed_between_the_slots_of_two_ranks(jobs: TrainingJobs, train_data: Tables, tmp_path: Path) -> None:
    """The first rank's slot is free, so that rank does not wait for the writer: the second rank must start another
    one."""
    faults = WriterFaults.order(tmp_path / "faults" / "host-0", WriterFault("persist", "word", time=2))
    every: Tables = {"train": {"steps": 3}, "checkpoint": {"interval": 1, "slots": 1}}
    jobs.run(
        make_config(train_data, LAYOUT, every, place(tmp_path)), CaseOrders(writer_faults=str(tmp_path / "faults"))
    )
    assert faults.num_reached == 1
    wait_for_the_end_of_writers(tmp_path)
    assert steps_that_are_whole(tmp_path / "checkpoints") == [1, 2, 3]
