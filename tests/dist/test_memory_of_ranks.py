"""The memory estimate equals the measured memory of each rank in steps of several ranks, exchanges included."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.memory import BAR, CASES, measure_rank, with_changes
from megatrain.config.config import Config
from tests.helpers.rank_pool import RankPool

SMALL = {"model.vocab_size": 1024, "model.seq_len": 128, "model.hidden_size": 128, "batch.global_batch_size": 8}
NAMES = [
    "parallel block, tp2, 4 sequence chunks",
    "GPT, pp2, 2 chunks",
    "Llama, tp2 pp2, zero bubble, selective",
    "Llama, dp2, ZeRO-2, bf16",
    "GPT, pp2, 2 chunks of uneven layers",
    "GPT, dp2, ZeRO-2, bf16, gradients summed in bf16",
    "GPT, dp2, full, gradients summed in bf16",
]
LAYOUTS: dict[str, dict[str, Any]] = {name: CASES[name] for name in NAMES} | {
    "one key-value head, tp2": {"parallel.tp_size": 2, "model.num_kv_heads": 1},
    "FP8, pp2, zero bubble": {
        "train.precision": "bf16", "fp8.recipe": "tensorwise", "parallel.pp_size": 2,
        "parallel.schedule": "zero_bubble",
    },
    "tp2 dp2, Muon, few activations": {
        "parallel.tp_size": 2, "parallel.dp_size": 2, "optimizer.name": "muon", "model.seq_len": 16,
        "model.vocab_size": 64, "model.num_layers": 6,
    },
    "dp2, 2 chunks on one stage, a tied head, ZeRO-2, gradients summed in bf16": {
        "parallel.dp_size": 2, "parallel.num_chunks": 2, "parallel.schedule": "interleaved", "parallel.zero_stage": 2,
        "train.precision": "bf16", "parallel.grad_reduce_dtype": "bf16",
    },
    "pictures, tp2 pp2, selective": {
        "parallel.tp_size": 2, "parallel.pp_size": 2, "parallel.recompute": "selective", "model.picture_size": 64,
        "model.patch_size": 8, "model.encoder_num_layers": 3, "batch.micro_batch_size": 1, "batch.global_batch_size": 2,
    },
    "dp2, zero bubble": {"parallel.pp_size": 2, "parallel.dp_size": 2, "parallel.schedule": "zero_bubble"},
    "parallel block, full, pp2, zero bubble": {
        "model.block": "parallel", "parallel.recompute": "full", "parallel.pp_size": 2,
        "parallel.schedule": "zero_bubble",
    },
}  # fmt: skip


@pytest.mark.slow(kept=["GPT, pp2, 2 chunks of uneven layers", "pictures, tp2 pp2, selective"])
@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS)
def test_estimate_is_the_memory_of_each_rank(changes: dict[str, Any], rank_pool: RankPool) -> None:
    tables = with_changes(SMALL | changes | {"parallel.bucket_size": 50_000})
    world_size = Config.from_dict(tables).layout(None).world_size

    for counted, estimated, moment in rank_pool.run(measure_rank, world_size, tables):
        assert estimated == pytest.approx(counted, rel=BAR), moment
