"""Batch-size ramp-up: the global batch grows with the consumed samples by Megatron's rule, equally in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.training_jobs import Tables, TrainingJobs, assert_close, distance
from tests.helpers.training_case import CaseOrders, make_config, on_layout

# 2 increments from 4 to 12 within 20 samples: one every 10 samples
RAMPUP: Tables = {
    "batch": {"rampup_start": 4, "rampup_increment": 4, "rampup_samples": 20, "global_batch_size": 12},
    "train": {"steps": 6},
    "model": {"num_layers": 2},
}
# Megatron: start + increment * int(consumed / (samples / increments)), and the full batch once consumed > samples.
# Computed by hand: 0 -> 4, 4 -> 4, 8 -> 4, 12 -> 8, 20 -> 12, 32 -> 12
SIZES = [4, 4, 4, 8, 12, 12]
CONSUMED = [4, 8, 12, 20, 32, 44]


@pytest.mark.slow
def test_rampup_is_megatrons_and_the_same_in_two_layouts(jobs: TrainingJobs, train_data: Tables) -> None:
    reference = jobs.remembered(make_config(train_data, RAMPUP))
    assert [report.global_batch_size for report in reference.steps] == SIZES
    assert [report.consumed_samples for report in reference.steps] == CONSUMED
    assert [report.consumed_tokens for report in reference.steps] == [16 * samples for samples in CONSUMED]

    run = jobs.run(make_config(train_data, RAMPUP, on_layout(2, 2, 2)))
    assert [report.global_batch_size for report in run.steps] == SIZES
    assert [len(samples) for samples in run.samples_by_step().values()] == SIZES
    assert_close(run.losses, reference.losses, 1e-10, "loss")
    assert max(distance(run.final, reference.final).values()) <= 1e-10


@pytest.mark.slow
def test_rampup_goes_on_after_a_resume(jobs: TrainingJobs, train_data: Tables, tmp_path: Path) -> None:
    place: Tables = {"job": {"run_directory": str(tmp_path)}}
    jobs.run(make_config(train_data, RAMPUP, place, on_layout(1, 1, 4)), CaseOrders(stop_at=(2, 3)))
    after = jobs.run(make_config(train_data, RAMPUP, place, on_layout(2, 2, 1)))
    reference = jobs.remembered(make_config(train_data, RAMPUP))

    assert [report.global_batch_size for report in after.steps] == SIZES[4:]
    assert [report.consumed_samples for report in after.steps] == CONSUMED[4:]
    assert_close(after.losses, reference.losses[4:], 1e-10, "loss")
