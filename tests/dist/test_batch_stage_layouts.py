"""Stages with different batch sizes: the same numbers on one device and in any layout, also after a resume within a
stage.

The first stage begins in the middle of a step of 8, the second one at the end of a step of 4.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest

from tests.dist.training_jobs import Run, Tables, TrainingJobs, assert_close, distance
from tests.helpers.training_case import CaseOrders, make_config, on_layout
from tests.helpers.waiting import wait_until

SEQ_LEN = 16
STAGES: Tables = {
    "data_stage": {"after_tokens": 10 * SEQ_LEN - 3, "global_batch_size": 4},
    "data_stage-2": {"after_tokens": 20 * SEQ_LEN, "global_batch_size": 12},
    "model": {"num_layers": 2},
    "train": {"steps": 6},
}
# Computed by hand: the step at sample 8 still has 8, although the stage begins at sample 10.
SIZES = [8, 8, 4, 12, 12, 12]
CONSUMED = list(accumulate(SIZES))


def assert_same_numbers(runs: list[Run], reference: Run) -> None:
    """Check that consecutive runs together equal `reference`, which had no stop."""
    assert [step.global_batch_size for run in runs for step in run.steps] == SIZES
    assert [step.consumed_samples for run in runs for step in run.steps] == CONSUMED
    assert [step.consumed_tokens for run in runs for step in run.steps] == [SEQ_LEN * samples for samples in CONSUMED]
    found: dict[int, list[int]] = {}
    for run in runs:
        found |= run.samples_by_step()
    starts = [0, *CONSUMED[:-1]]
    assert found == {first: list(range(first, end)) for first, end in zip(starts, CONSUMED, strict=True)}
    assert_close([loss for run in runs for loss in run.losses], reference.losses, 1e-10, "loss")
    assert [step.lr for run in runs for step in run.steps] == [step.lr for step in reference.steps]
    assert max(distance(runs[-1].final, reference.final).values()) <= 1e-10


@pytest.mark.slow(kept=["pp2-dp2"])
@pytest.mark.parametrize(
    "layout",
    [on_layout(1, 2, 2), on_layout(2, 1, 2), {"parallel": {"dp_size": 3, "pp_size": 2, "zero_stage": 2}}],
    ids=["pp2-dp2", "tp2-dp2", "pp2-dp3-zero2"],
)
def test_stages_train_alike_on_one_device_and_in_a_layout(
    layout: Tables, jobs: TrainingJobs, train_data: Tables
) -> None:
    reference = jobs.remembered(make_config(train_data, STAGES))
    run = jobs.run(make_config(train_data, STAGES, layout))
    assert_same_numbers([run], reference)
    assert reference.losses[-1] < reference.losses[0]
    begins = [note for note in run.ranks[0].notes if "the global batch is" in note]
    assert [note.partition(";")[0] for note in begins] == [
        "from step 3 on, the global batch is 4",
        "from step 4 on, the global batch is 12",
    ]


@pytest.mark.slow
def test_stages_go_on_through_4_5_3_and_4_replicas(jobs: TrainingJobs, train_data: Tables, tmp_path: Path) -> None:
    """The stops are in the middle of the first stage's steps, at the beginning of the second stage, and in its
    middle. In one step, one of 5 replicas has no sample."""
    place: Tables = {"job": {"run_directory": str(tmp_path)}}
    reference = jobs.remembered(make_config(train_data, STAGES))
    runs = []
    for dp_size, stop in ((4, 1), (5, 3), (3, 5), (4, None)):
        layout: Tables = {"parallel": {"bucket_size": 3000, "dp_size": dp_size}}
        orders = CaseOrders() if stop is None else CaseOrders(stop_at=(dp_size - 1, stop - 1))
        runs.append(jobs.run(make_config(train_data, STAGES, place, layout), orders))
        wait_until(lambda: not list(tmp_path.glob("megatrain-arena*")), "no snapshot left in memory")
    assert [len(run.steps) for run in runs] == [1, 2, 2, 1]
    assert_same_numbers(runs, reference)


@pytest.mark.slow
def test_stages_may_change_at_a_resume(jobs: TrainingJobs, train_data: Tables, tmp_path: Path) -> None:
    place: Tables = {"job": {"run_directory": str(tmp_path)}}
    jobs.run(make_config(train_data, STAGES, place), CaseOrders(stop_at=(0, 3)))
    other: Tables = {
        # A stage that is over, and one that begins elsewhere.
        "data_stage": {"after_tokens": 5 * SEQ_LEN, "global_batch_size": 2},
        "data_stage-2": {"after_tokens": 50 * SEQ_LEN, "global_batch_size": 6},
    }
    after = jobs.run(make_config(train_data, STAGES, place, other))
    assert CONSUMED[3] == 32
    assert [step.global_batch_size for step in after.steps] == [2, 2]
    assert sorted(after.samples_by_step()) == [32, 34]
