"""A model with pictures computes in every layout, and after a restart in another, what one process computes, in fp64.

The rows are a pairwise covering array over layouts and the options that change how the encoder computes or is placed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.covering_array import covering_array
from tests.dist.test_resume import STEPS, Sizes, assert_every_sample_is_trained_on_once, stop_and_resume
from tests.dist.training_jobs import (
    TWO_STEPS,
    Tables,
    TrainingJobs,
    assert_bitwise,
    assert_continues,
    assert_parity,
)
from tests.helpers.training_case import make_config, on_layout

BOUND = 1e-10
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-pp2-dp2": on_layout(2, 2, 2),
    "tp4-pp2-gpipe": on_layout(4, 2, 1, schedule="gpipe"),
    "pp2-dp2-chunks2": on_layout(1, 2, 2, 2),
    "tp2-dp2": on_layout(2, 1, 2),
    "tp2-pp2-zero-bubble": on_layout(2, 2, 1, schedule="zero_bubble"),
}
PICTURES: Tables = {
    "model": {
        "picture_size": 24, "patch_size": 12, "encoder_hidden_size": 24, "encoder_num_layers": 2,
        "encoder_num_heads": 4,
    },
    "data": {"pictures": "drawn"},
}  # fmt: skip
FACTORS: dict[str, list[Any]] = {
    "layout": list(LAYOUTS),
    "recompute": ["none", "selective", "full"],
    "optimizer": ["adamw", "muon"],
    "accumulation": ["fewest", "more"],
    "micro_batch_size": [1, 2],
    "has_tied_head": [True, False],
    # more tp ranks than keys of the decoder; those of the encoder are always divided
    "num_kv_heads": [8, 1],
    "norm": ["layernorm", "rmsnorm_zero_centered"],
    "positions": ["learned", "rope"],
    "has_scaled_embedding": [False, True],
    "dropout": [0.0, 0.1],
    "has_document_mask": [False, True],
    "zero_stage": [1, 2],
    "overlap": [True, False],
    "num_sequence_chunks": [1, 2],
    "offload_layers": [0, 1],
}
MODEL_KEYS = ("has_tied_head", "num_kv_heads", "norm", "positions", "has_scaled_embedding", "dropout")
ROWS = covering_array(FACTORS, seed=3)


@pytest.mark.slow(kept=["tp2-dp2-muon-none0", "tp2-pp2-zero-bubble-muon-none"])
@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: "-".join(row[key] for key in ("layout", "optimizer", "recompute"))
)
def test_pictures_give_the_numbers_of_one_process(row: dict[str, Any], jobs: TrainingJobs) -> None:
    sizes = LAYOUTS[row["layout"]]["parallel"]
    pp, dp = sizes["pp_size"], sizes["dp_size"]
    is_zero_bubble = sizes["schedule"] == "zero_bubble"
    least = pp if sizes["num_chunks"] > 1 or is_zero_bubble else 1
    num_microbatches = pp + 1 if row["accumulation"] == "more" else least
    common: Tables = {
        "model": PICTURES["model"]
        | {key: row[key] for key in MODEL_KEYS}
        | {"num_layers": max(2, pp * sizes["num_chunks"])},
        "data": PICTURES["data"] | {"has_document_mask": row["has_document_mask"]},
        "optimizer": {"name": row["optimizer"]},
        "batch": {
            "micro_batch_size": row["micro_batch_size"],
            "global_batch_size": num_microbatches * row["micro_batch_size"] * dp,
        },
    }
    options = {"parallel": {key: row[key] for key in ("recompute", "zero_stage", "overlap", "offload_layers")}}
    if is_zero_bubble:
        options["parallel"]["zero_stage"] = 1
    elif sizes["tp_size"] > 1:
        options["parallel"]["num_sequence_chunks"] = row["num_sequence_chunks"]
    reference = jobs.run(make_config(TWO_STEPS, common))
    run = jobs.run(make_config(TWO_STEPS, LAYOUTS[row["layout"]], common, options))

    assert {"encoder.patch.weight", "encoder.position", "projector.bias"} <= reference.final.keys()
    assert_bitwise(run.initial, reference.initial)
    assert_parity(run, reference, BOUND)


@pytest.mark.slow(kept=["pair0"])
@pytest.mark.parametrize("pair", [((1, 2, 2, 1), (2, 1, 1, 1)), ((1, 2, 2, 2), (4, 2, 1, 1))])
def test_pictures_resumed_at_another_layout(pair: tuple[Sizes, Sizes], jobs: TrainingJobs, tmp_path: Path) -> None:
    depth = {"num_layers": max(pp * chunks for _, pp, _, chunks in pair)}
    common: Tables = {
        **PICTURES,
        "model": PICTURES["model"] | depth,
        "train": {"steps": STEPS},
        "optimizer": {"eps": 1e-4},
    }
    before, after = stop_and_resume(jobs, common, tmp_path, *pair)
    reference = jobs.remembered(make_config(common))

    assert_continues(before, after, reference, BOUND)
    assert_every_sample_is_trained_on_once(before, after)
