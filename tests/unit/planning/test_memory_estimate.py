"""Estimates of memory, and the ready-made configurations, which fit GPUs of 80 GiB."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.memory import LLAMA, measure_rank, with_changes
from megatrain.config.load import load_config
from megatrain.planning import chunks
from megatrain.planning.footprint import HostCopies
from megatrain.planning.run_plan import plan_run
from megatrain.training import rank_model as rank_model_module
from tests.helpers.rank_protocol import RankContext
from tests.helpers.source_tree import ROOT

SMALL = {
    "model.seq_len": 128,
    "model.hidden_size": 128,
    "model.vocab_size": 1024,
    # so many sequences that activations take most of the memory
    "batch.micro_batch_size": 4,
    "batch.global_batch_size": 8,
}
LLAMA_BF16 = LLAMA | {"train.precision": "bf16"}
CASES: dict[str, dict[str, Any]] = {
    "GPT": {},
    "Llama, bf16, untied": LLAMA_BF16,
    "selective": LLAMA_BF16 | {"parallel.recompute": "selective"},
    "z-loss and label smoothing": {"train.z_loss": 1e-4, "train.label_smoothing": 0.1},
    "FP8": LLAMA_BF16 | {"fp8.recipe": "tensorwise"},
    "FP8, one micro-batch": LLAMA_BF16 | {"fp8.recipe": "tensorwise", "batch.global_batch_size": 4},
    "FP8, ZeRO-2": LLAMA_BF16 | {"fp8.recipe": "tensorwise", "parallel.zero_stage": 2},
    "FP8, delayed, selective": LLAMA_BF16
    | {"fp8.recipe": "tensorwise", "fp8.scaling": "delayed", "parallel.recompute": "selective"},
    "FP8 by row, full recompute": LLAMA_BF16 | {"fp8.recipe": "rowwise", "parallel.recompute": "full"},
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
    "ZeRO-2, gradients in bf16": LLAMA_BF16 | {"parallel.zero_stage": 2, "parallel.grad_reduce_dtype": "bf16"},
    "offloaded": LLAMA_BF16 | {"model.num_layers": 6, "parallel.offload_layers": 3},
    "documents, full recompute, LAMB, ZeRO-2": {
        "data.has_document_mask": True,
        "model.num_layers": 6,
        "model.vocab_size": 256,
        "parallel.recompute": "full",
        "parallel.zero_stage": 2,
        "optimizer.name": "lamb",
    },
    "Muon and an average, so few activations that the update is the fullest moment": LLAMA_BF16
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
        changes = LLAMA_BF16 | {
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


READY = ("llama3_8b", "qwen3_8b", "gemma3_4b", "olmo2_7b")
GIB = 1 << 30
LARGEST = 75 * GIB
"""The limit for the tensors of one rank: the allocator and libraries need a part of the 80 GiB."""


def comment_of(name: str) -> str:
    """Return the comment at the top of a file as one line."""
    lines = (ROOT / "configs" / f"{name}.toml").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines)


def overrides_of(name: str, num_gpus: int) -> list[str]:
    """Return the overrides of the command line for this number of GPUs: those for 64, and more for fewer GPUs."""
    starts = [rf"--nnodes 8 --nproc-per-node 8 \.\.\. -m megatrain\.train configs/{name}\.toml"]
    if num_gpus != 64:
        starts.append(f"On {num_gpus} GPUs:")
    found = [re.search(rf"{start}((?: --[\w.]+=\w+)+)", comment_of(name)) for start in starts]
    return [override for one in found if one is not None for override in one[1].split()]


@pytest.mark.slow(kept=["llama3_8b-8"])
@pytest.mark.timeout(900)  # The plan of a long sequence with windows has many operations.
@pytest.mark.parametrize("num_gpus", [64, 8])
@pytest.mark.parametrize("name", READY)
def test_ready_configs_need_the_memory_they_state(name: str, num_gpus: int) -> None:
    path, overrides = ROOT / "configs" / f"{name}.toml", overrides_of(name, num_gpus)
    loaded = load_config(path, overrides, world_size=num_gpus, is_for_training=True)

    plan = plan_run(loaded.config)

    assert plan.layout.world_size == num_gpus
    needed = max(stage.memory.total for stage in plan.stages)
    assert needed < LARGEST
    stated = re.search(r"Tensors need (\d+) GiB of each of 64 GPUs and (\d+) GiB of each of 8", comment_of(name))
    assert stated is not None, comment_of(name)
    assert int(stated[1 if num_gpus == 64 else 2]) == round(needed / GIB)
    assert f"{plan.num_parameters:,} parameters" in comment_of(name)
