"""The memory of a GPU that a dry run estimates, with the blocks of attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.memory import LLAMA, with_changes
from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.ops.attention_segments import segments_of
from megatrain.ops.capped_attention import CappedScores, capped_attention
from megatrain.ops.segment_attention import segment_attention
from megatrain.planning.chunks import plan_stage, planned_mesh
from megatrain.planning.memory import estimate_memory
from megatrain.planning.peak_tensor_bytes import PeakTensorBytes
from megatrain.planning.plan_text import render
from megatrain.planning.run_plan import plan_run
from megatrain.schedule import build_schedule
from megatrain.training.rank_model import RankModel, build_rank_model
from tests.helpers.single_rank import SilentRecorder, single_rank_mesh

LLAMA_BF16 = LLAMA | {"train.precision": "bf16"}
CASES: dict[str, dict[str, Any]] = {
    "GPT": {},
    "GPT, bf16": {"train.precision": "bf16"},
    "parallel block, dropout": {"model.block": "parallel", "model.dropout": 0.1, "train.precision": "bf16"},
    "Llama": LLAMA_BF16,
    "Llama, selective recompute": LLAMA_BF16 | {"parallel.recompute": "selective"},
    "Llama, full recompute": LLAMA_BF16 | {"parallel.recompute": "full"},
    "Llama, FP8": LLAMA_BF16 | {"fp8.recipe": "tensorwise"},
    "Llama, FP8 by row": LLAMA_BF16 | {"fp8.recipe": "rowwise"},
}


@pytest.mark.slow(kept=["Llama, FP8 by row"])
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_gpu_estimate_equals_a_step_on_fake_tensors(changes: dict[str, Any]) -> None:
    config = Config.from_dict(with_changes({**changes, "runtime.device": "cuda", "batch.global_batch_size": 4}))
    with planned_mesh(config, Layout(), 0) as mesh:
        estimate = estimate_memory(config, Layout(), 0, plan_stage(config, mesh))
    rank_model = build_rank_model(config, single_rank_mesh(), SilentRecorder(), torch.device("cpu"))
    rank_model.set_training(True)

    counted = peak_of_a_pass(rank_model)

    assert estimate.total == pytest.approx(counted, rel=0.01), estimate.moment


def peak_of_a_pass(rank_model: RankModel) -> int:
    """Return the maximum bytes of tensors in one forward and backward, including all other live tensors."""
    config, device = rank_model.config, rank_model.device
    samples = torch.arange(config.batch.micro_batch_size)
    tokens = torch.zeros(config.model.seq_len, len(samples), dtype=torch.int64)
    inputs = [rank_model.pipeline_input(tokens.clone(), tokens.clone(), samples, None) for _ in range(2)]
    positions = [
        position for position in rank_model.pipeline.chunks[0].module.positions.values() if position is not None
    ]
    tables = [x for position in positions for x in position.table(len(tokens), device, rank_model.pipeline.dtype)]
    standing: list[Tensor] = [*tables, *(x for each in inputs for x in (each.tokens_SB, each.labels_SB))]
    for _, state in rank_model.optimizer.states:
        standing += [state.bucket.values, state.bucket.gradients, *state.tensors().values()]
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes, PeakTensorBytes() as memory:
        alive = [fakes.from_tensor(x) for x in standing]  # Tensors of one storage share a storage.
        memory.include(alive)
        for chunk in rank_model.data_parallel:
            chunk.start_step()
        scale = torch.ones((), dtype=torch.float64)
        rank_model.pipeline.train(build_schedule("1f1b", 1, 1, len(inputs)), inputs, lambda: scale)
        return memory.peak_bytes


def test_host_memory_of_offloaded_activations_is_reported() -> None:
    plans = []
    for num_offloaded in (0, 3):
        changes = LLAMA_BF16 | {"runtime.device": "cuda", "parallel.offload_layers": num_offloaded}
        plans.append(plan_run(Config.from_dict(with_changes(changes))))
    (plain,), (offloaded,) = (plan.stages for plan in plans)

    assert plain.memory.on_host == 0
    tokens, hidden, qkv, ffn = 2 * 256, 256, 256 + 2 * 128, 1024
    # inputs of the norms and of the sublayers, heads, attention's output, both sides of the activation; in bf16
    a_layer = 2 * tokens * (2 * hidden + 2 * hidden + qkv + hidden + 2 * ffn + ffn)
    assert offloaded.memory.on_host == pytest.approx(3 * a_layer, rel=0.01)
    reported = (
        f"pinned in host memory, in MiB (a host has several ranks): all layers: {offloaded.memory.on_host / 2**20:.2f}"
    )
    assert reported in render(plans[1])
    assert "Offloaded" not in render(plans[0])


HEADS, KEY_HEADS, DIM = 4, 2, 8
Attention = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def capped(q: Tensor, k: Tensor, v: Tensor, window_size: int) -> Tensor:
    return capped_attention(q, k, v, CappedScores(0.3, 5.0, window_size, None))


def in_segments(q: Tensor, k: Tensor, v: Tensor, window_size: int) -> Tensor:
    return segment_attention(q, k, v, segments_of(len(q), window_size, None, q.dtype, q.device), None)


def peaks(attention: Attention, seq_len: int, window_size: int, device: str) -> tuple[int, int]:
    """Return the peaks of live bytes in forward and in backward."""
    q = torch.zeros(seq_len, 1, HEADS, DIM, dtype=torch.bfloat16, device=device, requires_grad=True)
    k, v = (torch.zeros(seq_len, 1, KEY_HEADS, DIM, dtype=q.dtype, device=device, requires_grad=True) for _ in "kv")
    with PeakTensorBytes(on_meta=device == "meta") as memory:
        out = attention(q, k, v, window_size)
        forward = memory.peak_bytes
        memory.reset_peak()
        out.backward(torch.zeros_like(out))
        return forward, memory.peak_bytes


@pytest.mark.parametrize(
    ("attention", "window_size", "seq_len"),
    [
        ([capped, in_segments][number % 2], window_size, seq_len)
        for number, (window_size, seq_len) in enumerate(itertools.product([0, 40, 300], [200, 256, 300, 556, 1300]))
    ],
)
def test_planned_blocks_need_the_memory_of_all(attention: Attention, window_size: int, seq_len: int) -> None:
    assert peaks(attention, seq_len, window_size, "meta") == peaks(attention, seq_len, window_size, "cpu")
