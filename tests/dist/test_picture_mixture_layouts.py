"""A mixture of samples with and without pictures gives, in every layout, the numbers of one process, in fp64.

The one process has micro-batches of one sample, so each of them has only pictures or only text. The rows are a pairwise
covering array over layouts and the options that change which micro-batches have pictures, or how the encoder computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.config.config import Config
from tests.dist.covering_array import covering_array
from tests.dist.test_resume import STEPS, assert_every_sample_is_trained_on_once, stop_and_resume
from tests.dist.training_jobs import (
    TWO_STEPS,
    Tables,
    TrainingJobs,
    assert_bitwise,
    assert_continues,
    assert_parity,
)
from tests.helpers.read_samples import read_configured
from tests.helpers.training_case import make_config, on_layout

BOUND = 1e-10
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-pp2-dp2": on_layout(2, 2, 2),
    # the second rank begins with the rows after the patches
    "tp4": on_layout(4, 1, 1),
    # 8 micro-batches for 3 replicas
    "dp3": on_layout(1, 1, 3),
    "pp2-dp2-chunks2": on_layout(1, 2, 2, 2),
    "tp2-pp2-zero-bubble": on_layout(2, 2, 1, schedule="zero_bubble"),
}
FACTORS: dict[str, list[Any]] = {
    "layout": list(LAYOUTS),
    "balance": ["cost", "none"],
    "recompute": ["none", "selective", "full"],
    "zero_stage": [1, 2],
    "overlap": [True, False],
    "micro_batch_size": [2, 1],
    "has_document_mask": [False, True],
    "has_tied_head": [True, False],
    "has_scaled_embedding": [False, True],
    "optimizer": ["adamw", "muon"],
    "last_pictures": [0, 1],
}
"""last_pictures: whether samples of the second step have pictures."""
ROWS = covering_array(FACTORS, seed=2)


def mixture_of(data: Tables) -> Tables:
    """Return the tables of a mixture of the training tokens of `data` and drawn pictures, with held-out text."""
    model = {"picture_size": 24, "patch_size": 12, "encoder_hidden_size": 24, "encoder_num_layers": 2}
    return {
        "model": model | {"encoder_num_heads": 4},
        "data": {"validation": data["data"]["validation"]},
        "data_source": {"pictures": "drawn", "name": "drawn", "weight": 2.0},
        "data_source-2": {"path": data["data"]["train"], "name": "web", "weight": 3.0},
    }


def pictures_of_micro_batches(config: Config) -> list[int]:
    """Return how many pictures each micro-batch of the first step has, of all replicas."""
    found = (one.picture_place_K for part in read_configured(config) for one in part.microbatches)
    return [0 if place_K is None else len(place_K) for place_K in found]


@pytest.mark.slow(kept=["tp4-muon-cost"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[key] for key in ("layout", "optimizer", "balance")))
def test_mixed_pictures_give_the_numbers_of_one_process(
    row: dict[str, Any], jobs: TrainingJobs, all_data: Tables
) -> None:
    size = 8 * row["micro_batch_size"]
    common: Tables = mixture_of(all_data)
    common |= {
        "model": common["model"] | {key: row[key] for key in ("has_tied_head", "has_scaled_embedding")},
        "data": common["data"] | {"has_document_mask": row["has_document_mask"]},
        "optimizer": {"name": row["optimizer"]},
        "batch": {"micro_batch_size": 1, "global_batch_size": size},
    }
    if not row["last_pictures"]:
        common["data_stage"] = {"after_tokens": size * 16, "weights": "web=1"}
    options: Tables = {
        "parallel": {key: row[key] for key in ("recompute", "zero_stage", "overlap")},
        "data": common["data"] | {"balance": row["balance"]},
        "batch": common["batch"] | {"micro_batch_size": row["micro_batch_size"]},
    }
    layout = LAYOUTS[row["layout"]]
    if layout["parallel"]["schedule"] == "zero_bubble":
        options["parallel"]["zero_stage"] = 1
    config = make_config(TWO_STEPS, layout, common, options)
    counts = pictures_of_micro_batches(config)
    assert 0 in counts
    assert max(counts) > 0
    reference = jobs.remembered(make_config(TWO_STEPS, common))
    run = jobs.run(config)

    assert_bitwise(run.initial, reference.initial)
    assert_parity(run, reference, BOUND)
    assert run.evaluation.loss == pytest.approx(reference.evaluation.loss, rel=BOUND)
    assert [report.num_pictures for report in run.steps] == [report.num_pictures for report in reference.steps]
    assert (run.steps[1].num_pictures > 0) == bool(row["last_pictures"])


@pytest.mark.slow
def test_mixed_pictures_resumed_at_another_layout(jobs: TrainingJobs, all_data: Tables, tmp_path: Path) -> None:
    """The second half deals by cost, which changes no number."""
    common: Tables = {**mixture_of(all_data), "train": {"steps": STEPS}, "optimizer": {"eps": 1e-4}}
    by_cost: Tables = {"data": common["data"] | {"balance": "cost"}}
    before, after = stop_and_resume(jobs, common, tmp_path, (1, 2, 2, 2), (2, 1, 2, 1), by_cost)
    reference = jobs.remembered(make_config(common))

    assert_continues(before, after, reference, BOUND)
    assert_every_sample_is_trained_on_once(before, after)
