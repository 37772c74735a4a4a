"""The estimate is what a real step holds: counted in this process, within the 10 % that the benchmark promises."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.memory import measure_rank, with_changes
from tests.helpers.rank_protocol import RankContext

SMALL = {
    "model.seq_len": 128,
    "model.hidden_size": 128,
    "model.vocab_size": 1024,
    # so many sequences that activations are most of the memory
    "batch.micro_batch_size": 8,
    "batch.global_batch_size": 16,
}
LLAMA: dict[str, Any] = {
    "model.positions": "rope",
    "model.norm": "rmsnorm",
    "model.mlp": "swiglu",
    "model.has_bias": False,
    "model.num_kv_heads": 2,
    "model.has_tied_head": False,
    "train.precision": "bf16",
}
CASES: dict[str, dict[str, Any]] = {
    "GPT": {},
    "Llama, bf16, untied": LLAMA,
    "FP8": LLAMA | {"fp8.recipe": "tensorwise"},
    "FP8 by row, full recompute": LLAMA | {"fp8.recipe": "rowwise", "parallel.recompute": "full"},
    "rotary in place, swiglu with bias": {"model.positions": "rope", "model.mlp": "swiglu"},
    "parallel block, window, dropout, selective": {
        "model.block": "parallel",
        "model.window_size": 32,
        "model.dropout": 0.1,
        "parallel.recompute": "selective",
    },
    "documents, full recompute, LAMB, ZeRO-2": {
        "data.has_document_mask": True,
        "model.num_layers": 6,
        "model.vocab_size": 256,
        "parallel.recompute": "full",
        "parallel.zero_stage": 2,
        "optimizer.name": "lamb",
    },
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_estimate_is_what_a_step_holds(changes: dict[str, Any]) -> None:
    counted, estimated, moment = measure_rank(RankContext(0, 1, ""), with_changes({**SMALL, **changes}))

    assert abs(estimated / counted - 1) < 0.1, f"{counted:,} counted, {estimated:,} estimated: {moment}"
