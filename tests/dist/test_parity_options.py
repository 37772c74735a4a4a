"""Every option, and every pair of options, computes in parallel what one process computes, in fp64.

The rows are a pairwise covering array over options and layouts (covering_array.py). Each row is compared with one
process that has the same model, optimizer and batch.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from tests.dist.covering_array import all_pairs, covering_array
from tests.dist.training_jobs import (
    TWO_STEPS,
    Tables,
    TrainingJobs,
    assert_bitwise,
    assert_close,
    assert_parity,
)
from tests.helpers.training_case import make_config, on_layout

BOUND = 1e-10

LAYOUTS: dict[str, dict[str, Any]] = {
    # each axis together with each other axis, three times with a tp rank that has no key-value head of its own
    "tp2-pp2-dp2-chunks2": on_layout(2, 2, 2, 2),
    "tp4-pp2-gpipe": on_layout(4, 2, 1, schedule="gpipe"),
    # a stage with neither end of the model
    "pp3-dp2-1f1b": on_layout(1, 3, 2),
    "tp2-dp2": on_layout(2, 1, 2),
}
GEMMA: dict[str, Any] = {
    "block": "serial", "norm": "rmsnorm_zero_centered", "branch_norm": "both", "mlp": "geglu",
    "has_scaled_embedding": True, "window_size": 5, "full_attention_every": 2, "attention_scale": 0.3,
    "attention_softcap": 1.5, "head_softcap": 2.0,
}  # fmt: skip
ROTARY: dict[str, Any] = {"positions": "rope", "rope_local_theta": 100.0, "rope_fraction": 0.5}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gemma": GEMMA,
    "olmo": GEMMA | ROTARY | {"branch_norm": "output", "qk_norm": "all_heads"},
    "neox": {"block": "parallel_two_norms", "mlp": "gelu_exact"},
}
"""Keys of models that replace the same keys of a row."""
FACTORS: dict[str, list[Any]] = {
    "kind": list(KINDS),
    "layout": list(LAYOUTS),
    "recompute": ["none", "selective", "full"],
    "block": ["serial", "parallel"],
    "optimizer": ["adamw", "lamb", "muon"],
    # fewest: one micro-batch, fewer than stages (interleaved needs at least as many); more: a number that pp does not
    # divide
    "accumulation": ["fewest", "more"],
    "micro_batch_size": [1, 2],
    "has_tied_head": [True, False],
    "window_size": [0, 5],
    "dropout": [0.0, 0.1],
    # 1: fewer than tp ranks, in each layout with tp
    "num_kv_heads": [8, 4, 1],
    "norm": ["layernorm", "rmsnorm"],
    "mlp": ["gelu", "swiglu"],
    "positions": ["learned", "rope", "none"],
    "has_bias": [True, False],
    "has_qkv_bias": [True, False],
    "qk_norm": ["none", "head"],
    "has_document_mask": [False, True],
    "zero_stage": [1, 2],
    "overlap": [True, False],
    "num_sequence_chunks": [1, 4],
    "offload_layers": [0, 1],
    "z_loss": [0.0, 0.01],
    "label_smoothing": [0.0, 0.1],
}
MODEL_KEYS = (
    "block",
    "has_tied_head",
    "window_size",
    "dropout",
    "num_kv_heads",
    "norm",
    "mlp",
    "positions",
    "has_bias",
    "has_qkv_bias",
    "qk_norm",
)
ROWS = covering_array(FACTORS, seed=7)  # one of the first seeds that give the fewest rows


def test_rows_cover_all_pairs() -> None:
    found = {
        ((combination, FACTORS[combination].index(row[combination])), (other, FACTORS[other].index(row[other])))
        for row in ROWS
        for combination, other in combinations(FACTORS, 2)
    }

    assert found == all_pairs(FACTORS)


@pytest.mark.slow(kept=["tp2-dp2-gemma-muon-selective0"])
@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: "-".join(row[key] for key in ("layout", "kind", "optimizer", "recompute"))
)
def test_options_give_the_numbers_of_one_process(row: dict[str, Any], jobs: TrainingJobs, all_data: Tables) -> None:
    sizes = LAYOUTS[row["layout"]]["parallel"]
    pp, dp, is_interleaved = sizes["pp_size"], sizes["dp_size"], sizes["num_chunks"] > 1
    num_microbatches = pp + 1 if row["accumulation"] == "more" else (pp if is_interleaved else 1)
    common: Tables = {
        "model": {
            **{key: row[key] for key in MODEL_KEYS},
            **KINDS[row["kind"]],
            "num_layers": max(2, pp * sizes["num_chunks"]),
        },
        "optimizer": {"name": row["optimizer"]},
        "batch": {
            "micro_batch_size": row["micro_batch_size"],
            "global_batch_size": num_microbatches * row["micro_batch_size"] * dp,
        },
        "data": all_data["data"] | {"has_document_mask": row["has_document_mask"]},
        "train": {key: row[key] for key in ("z_loss", "label_smoothing")},
        "evaluation": {"num_samples": 5},
    }
    options = {"parallel": {key: row[key] for key in ("recompute", "zero_stage", "overlap", "offload_layers")}}
    if sizes["tp_size"] > 1:
        options["parallel"]["num_sequence_chunks"] = row["num_sequence_chunks"]
    reference = jobs.run(make_config(TWO_STEPS, common))
    run = jobs.run(make_config(TWO_STEPS, LAYOUTS[row["layout"]], common, options))

    assert_bitwise(run.initial, reference.initial)
    assert_parity(run, reference, BOUND)
    assert run.evaluation.num_tokens == reference.evaluation.num_tokens
    assert_close([run.evaluation.loss], [reference.evaluation.loss], BOUND, "evaluation")
