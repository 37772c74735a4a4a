"""Evaluation on a part of the held-out windows: every layout takes the same ones, none of them twice.

The whole set, evaluated in every layout, is in test_parity_layouts.py.
"""

from __future__ import annotations

import pytest

from tests.dist.training_jobs import Tables, TrainingJobs, assert_close
from tests.helpers.training_case import make_config, on_layout

NUM_WINDOWS = 5
"""Neither 8 pipelines of one window nor 2 of two divide it: the last ones get windows that do not count."""
COMMON: Tables = {
    "evaluation": {"num_samples": NUM_WINDOWS, "interval": 1},
    "train": {"steps": 3},
    "model": {"dropout": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 8, 1), (2, 2, 2, 2), (1, 4, 1, 1)], ids=str)
def test_the_same_windows_count_in_every_layout(
    sizes: tuple[int, int, int, int], jobs: TrainingJobs, all_data: Tables
) -> None:
    reference = jobs.remembered(make_config(all_data, COMMON))
    run = jobs.run(make_config(all_data, COMMON, on_layout(*sizes)))

    evaluations = run.ranks[0].evaluations
    assert [evaluation.step for evaluation in evaluations] == [1, 2, 3]
    assert [evaluation.num_tokens for evaluation in evaluations] == [16 * NUM_WINDOWS] * 3
    expected = [evaluation.loss for evaluation in reference.ranks[0].evaluations]
    assert_close([evaluation.loss for evaluation in evaluations], expected, 1e-10, "evaluation")
    # evaluating between two steps changes neither of them
    assert_close(run.losses, reference.losses, 1e-10, "loss")
