"""Evaluation on a part of the held-out windows: every layout evaluates the same windows of each set once.

test_parity_layouts.py evaluates one whole set in every layout.
"""

from __future__ import annotations

import pytest

from megatrain.reporting import EvaluationReport
from tests.dist.conftest import VOCAB_SIZE
from tests.dist.training_jobs import TWO_STEPS, Tables, TrainingJobs, assert_close
from tests.helpers.tiny_data import write_corpus
from tests.helpers.training_case import make_config, on_layout

NUM_WINDOWS = 5
"""Neither 8 pipelines with one window nor 2 with two divide it: the last pipelines get windows that do not count."""
NUM_SMALL_TOKENS = 16 + 7 + 1
"""Two windows, the second one short: most pipelines get none."""
COMMON: Tables = {
    **TWO_STEPS,
    "evaluation": {"num_samples": NUM_WINDOWS, "interval": 1},
    "model": {"dropout": 0.1},
}


@pytest.fixture(scope="session")
def two_sets(all_data: Tables, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Return the tables that name training tokens and two validation sets."""
    small = write_corpus(tmp_path_factory.mktemp("tokens") / "small", NUM_SMALL_TOKENS, VOCAB_SIZE, seed=3)
    return {
        "data": {**all_data["data"], "validation": ""},
        "validation_set": {"path": all_data["data"]["validation"], "name": "large"},
        "validation_set-2": {"path": str(small), "name": "small"},
    }


@pytest.mark.slow(kept=["(1, 1, 2, 1)"])
@pytest.mark.parametrize("sizes", [(1, 1, 2, 1), (1, 1, 8, 1), (2, 2, 2, 2), (1, 4, 1, 1)], ids=str)
def test_every_layout_evaluates_the_same_windows(
    sizes: tuple[int, int, int, int], jobs: TrainingJobs, all_data: Tables, two_sets: Tables
) -> None:
    reference = jobs.remembered(make_config(two_sets, COMMON))
    alone = jobs.remembered(make_config(all_data, COMMON))
    run = jobs.run(make_config(two_sets, COMMON, on_layout(*sizes)))

    evaluations = run.ranks[0].evaluations
    assert [evaluation.step for evaluation in evaluations] == [1, 2]
    counts = [16 * NUM_WINDOWS, NUM_SMALL_TOKENS - 1]
    assert [[one.num_tokens for one in evaluation.sets] for evaluation in evaluations] == [counts] * 2
    assert [evaluation.num_tokens for evaluation in evaluations] == [sum(counts)] * 2
    assert_close(losses(evaluations), losses(reference.ranks[0].evaluations), 1e-10, "evaluation")
    # A set beside another set has the same loss as alone.
    assert_close(
        [evaluation.sets[0].loss for evaluation in evaluations],
        [evaluation.loss for evaluation in alone.ranks[0].evaluations],
        1e-10,
        "evaluation of the first set",
    )
    # Evaluating between two steps changes neither step.
    assert_close(run.losses, reference.losses, 1e-10, "loss")


def losses(evaluations: list[EvaluationReport]) -> list[float]:
    """Return the loss of all sets, and of each set, for all evaluations."""
    return [loss for evaluation in evaluations for loss in (evaluation.loss, *(part.loss for part in evaluation.sets))]
