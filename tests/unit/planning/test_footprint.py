"""The tensors that one layer keeps for backward, compared with a manual sum: an additional saved tensor changes it.

The estimate follows the code, so comparing it with a real step does not show whether the code keeps too much.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.memory import with_changes
from megatrain.config.config import Config
from megatrain.planning.chunks import plan_stage, planned_mesh

S, B, H, N = 64, 2, 64, 4
TOKENS = S * B
LLAMA: dict[str, Any] = {
    "model.positions": "rope",
    "model.norm": "rmsnorm",
    "model.mlp": "swiglu",
    "model.ffn_size": 3 * H,
    "model.has_bias": False,
    "model.num_kv_heads": 2,
    "model.has_tied_head": False,
}
BF16 = {"train.precision": "bf16"}
FP8 = {**LLAMA, **BF16, "model.num_kv_heads": N, "fp8.recipe": "tensorwise"}
# norm's input and output, twice; queries, keys, values; attention's output; both sides of the activation function
GPT_WIDTH = 2 * 2 * H + 3 * H + H + 2 * 4 * H
GPT_NUMBERS = 4 + N
"""Mean and deviation of two norms, and a sum per head: in the type of sums."""
LLAMA_WIDTH = 2 * 2 * H + 2 * H + H + 3 * 3 * H
LLAMA_NUMBERS = 2 + N
CASES: dict[str, tuple[dict[str, Any], float]] = {
    # changes, bytes per token
    "GPT": ({}, 4 * (GPT_WIDTH + GPT_NUMBERS)),
    "GPT, bf16": (BF16, 2 * GPT_WIDTH + 4 * GPT_NUMBERS),
    "GPT, fp64": ({"train.precision": "fp64"}, 8 * (GPT_WIDTH + GPT_NUMBERS)),
    "GPT, no bias": ({"model.has_bias": False}, 4 * (GPT_WIDTH + GPT_NUMBERS)),
    "GPT, dropout": ({"model.dropout": 0.1}, 4 * (GPT_WIDTH + GPT_NUMBERS) + 2 * 8),
    "GPT, selective": ({"parallel.recompute": "selective"}, 4 * (GPT_WIDTH - 2 * H - 4 * H + GPT_NUMBERS)),
    "GPT, full": ({"parallel.recompute": "full"}, 4 * H),
    "parallel block": ({"model.block": "parallel"}, 4 * (GPT_WIDTH - 2 * H + GPT_NUMBERS - 2)),
    "Llama": (LLAMA, 4 * (LLAMA_WIDTH + LLAMA_NUMBERS)),
    "Llama on a GPU": ({**LLAMA, **BF16, "runtime.device": "cuda"}, 2 * LLAMA_WIDTH + 4 * LLAMA_NUMBERS),
    "window on a GPU": ({**BF16, "model.window_size": 16, "runtime.device": "cuda"}, 2 * GPT_WIDTH + 4 * GPT_NUMBERS),
    "fp32 on a GPU": ({"runtime.device": "cuda"}, 4 * (GPT_WIDTH + GPT_NUMBERS)),
    "fp32 and a window on a GPU, whose mask all layers share": (
        {"model.window_size": 16, "runtime.device": "cuda"},
        4 * (GPT_WIDTH + GPT_NUMBERS),
    ),
    "documents on a GPU": (
        {**LLAMA, **BF16, "data.has_document_mask": True, "runtime.device": "cuda"},
        # Samples are separate calls, and their outputs are concatenated.
        2 * (LLAMA_WIDTH + H) + 4 * LLAMA_NUMBERS,
    ),
    "apex norms": (
        {**LLAMA, **BF16, "kernels.norm": "apex", "runtime.device": "cuda"},
        2 * LLAMA_WIDTH + 4 * LLAMA_NUMBERS,
    ),
    "two tensor ranks": ({"parallel.tp_size": 2}, 4 * (GPT_WIDTH + GPT_NUMBERS) / 2),
    "two tensor ranks, 4 sequence chunks": (
        {"parallel.tp_size": 2, "parallel.num_sequence_chunks": 4},
        4 * (GPT_WIDTH + GPT_NUMBERS) / 2,
    ),
    "two tensor ranks, selective": (
        {"parallel.tp_size": 2, "parallel.recompute": "selective"},
        4 * (GPT_WIDTH - 2 * H - 4 * H + GPT_NUMBERS) / 2,
    ),
    # in 8 bits: the inputs of four products
    "FP8": (FP8, 2 * (2 * H + 3 * H + H + 2 * 3 * H) + 4 * LLAMA_NUMBERS + 2 * H + H + 3 * H),
    "FP8 by Transformer Engine": (
        {**FP8, "fp8.backend": "transformer_engine", "runtime.device": "cuda"},
        # and weights, each in two forms
        2 * (2 * H + 3 * H + H + 2 * 3 * H) + 4 * LLAMA_NUMBERS + 6 * H + 2 * (4 * H * H + 9 * H * H) / TOKENS,
    ),
}  # fmt: skip


@pytest.mark.slow(kept=["GPT, bf16", "Llama"])
@pytest.mark.parametrize(("changes", "bytes_a_token"), CASES.values(), ids=CASES)
def test_a_layer_keeps_what_its_backward_needs(changes: dict[str, Any], bytes_a_token: float) -> None:
    kept = []
    for num_layers in (2, 3):
        tables = with_changes(
            {
                "model.seq_len": S,
                "model.hidden_size": H,
                "model.num_heads": N,
                "batch.micro_batch_size": B,
                "model.num_layers": num_layers,
                **changes,
            }
        )
        config = Config.from_dict(tables)
        with planned_mesh(config, config.layout(None), 0) as mesh:
            (chunk,) = plan_stage(config, mesh)
        kept.append(chunk.measured.footprint.kept)
        assert chunk.measured.footprint.kept_of_newest == 0, "without offloading, all micro-batches keep the same"

    # scales of FP8, states of random numbers
    assert 0 <= kept[1] - kept[0] - bytes_a_token * TOKENS < 256
