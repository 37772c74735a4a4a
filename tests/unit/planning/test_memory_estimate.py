"""The estimate equals the memory of a real step, counted in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.memory import measure_rank, with_changes
from megatrain.planning import chunks
from megatrain.planning.footprint import HostCopies
from megatrain.training import rank_model as rank_model_module
from tests.helpers.rank_protocol import RankContext

SMALL = {
    "model.seq_len": 128,
    "model.hidden_size": 128,
    "model.vocab_size": 1024,
    # so many sequences that activations take most of the memory
    "batch.micro_batch_size": 4,
    "batch.global_batch_size": 8,
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
    "selective": LLAMA | {"parallel.recompute": "selective"},
    "z-loss and label smoothing": {"train.z_loss": 1e-4, "train.label_smoothing": 0.1},
    "FP8": LLAMA | {"fp8.recipe": "tensorwise"},
    "FP8, one micro-batch": LLAMA | {"fp8.recipe": "tensorwise", "batch.global_batch_size": 4},
    "FP8, ZeRO-2": LLAMA | {"fp8.recipe": "tensorwise", "parallel.zero_stage": 2},
    "FP8, delayed, selective": LLAMA
    | {"fp8.recipe": "tensorwise", "fp8.scaling": "delayed", "parallel.recompute": "selective"},
    "FP8 by row, full recompute": LLAMA | {"fp8.recipe": "rowwise", "parallel.recompute": "full"},
    "rotary in place, swiglu with bias": {"model.positions": "rope", "model.mlp": "swiglu"},
    "parallel block, window, dropout, selective": {
        "model.block": "parallel",
        "model.window_size": 32,
        "model.dropout": 0.1,
        "parallel.recompute": "selective",
    },
    "chunks on one stage": {"parallel.num_chunks": 2, "parallel.schedule": "interleaved"},
    "ZeRO-2, chunks on one stage, a tied head": {
        "parallel.zero_stage": 2,
        "parallel.num_chunks": 4,
        "parallel.schedule": "interleaved",
        "parallel.bucket_size": 50_000,
        "batch.micro_batch_size": 1,
    },
    "ZeRO-2, gradients in bf16": LLAMA | {"parallel.zero_stage": 2, "parallel.grad_reduce_dtype": "bf16"},
    "offloaded": LLAMA | {"model.num_layers": 6, "parallel.offload_layers": 3},
    "documents, full recompute, LAMB, ZeRO-2": {
        "data.has_document_mask": True,
        "model.num_layers": 6,
        "model.vocab_size": 256,
        "parallel.recompute": "full",
        "parallel.zero_stage": 2,
        "optimizer.name": "lamb",
    },
    "Muon and an average, so few activations that the update is the fullest moment": LLAMA
    | {
        "optimizer.name": "muon",
        "optimizer.ema_decay": 0.9,
        "model.seq_len": 8,
        "model.vocab_size": 64,
        "batch.micro_batch_size": 1,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_estimate_is_the_memory_of_a_step(changes: dict[str, Any]) -> None:
    counted, estimated, moment = measure_rank(RankContext(0, 1, ""), with_changes({**SMALL, **changes}))

    assert estimated == pytest.approx(counted, rel=0.001), moment


class NumpyCopies:
    """Host memory that the counter of tensor bytes does not see, as it would not see it beside a GPU."""

    def start_copy_to_host(self, sources: Sequence[Tensor]) -> tuple[list[Any], None]:
        return [source.numpy().copy() for source in sources], None

    def start_copy_to_device(self, copies: Sequence[Any], copied: None) -> tuple[list[Tensor], None]:
        return [torch.from_numpy(copy).clone() for copy in copies], None

    def finish(self, pending: None) -> None:
        pass

    def abandon(self, sources: Sequence[Tensor]) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_offloaded_activations_are_off_the_device_as_estimated(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_model_module, "ImmediateCopies", NumpyCopies)
    monkeypatch.setattr(chunks, "ImmediateCopies", HostCopies)
    peaks = []
    for num_offloaded in (0, 2, 6):
        changes = LLAMA | {
            "model.num_layers": 6,
            "train.precision": "fp32",  # CPUs without bf16 take a minute for what fp32 does in seconds.
            "parallel.schedule": "gpipe",  # Two micro-batches wait at once.
            "parallel.recompute": recompute,
            "parallel.offload_layers": num_offloaded,
        }
        counted, estimated, moment = measure_rank(RankContext(0, 1, ""), with_changes({**SMALL, **changes}))
        peaks.append(counted)
        assert estimated == pytest.approx(counted, rel=0.001), moment

    assert peaks[0] > peaks[1] > peaks[2]
