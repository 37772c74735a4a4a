"""The roofline page: what it states is what the code launches, and its FLOPs are those of torch and of the MFU."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu_roofline import is_formula, layer_rows, run
from benchmarks.gpu_roofline_layers import layer, our_micro_batch
from benchmarks.gpu_roofline_trace import KernelTrace
from benchmarks.result import RESULTS
from benchmarks.tables import table
from megatrain.config.config import Config
from megatrain.ops.linear import add_product_
from megatrain.ops.normalization import rms_norm

S, H = 32, 64
SMALL: dict[str, dict[str, Any]] = {
    "model": {"vocab_size": 128, "seq_len": S, "hidden_size": H, "num_layers": 2, "num_heads": 4},
    "batch": {"micro_batch_size": 2, "global_batch_size": 4},
    "train": {"steps": 1, "precision": "bf16"},
    "optimizer": {"lr": 1e-3},
}
LLAMA = {
    "norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "has_bias": False, "num_kv_heads": 2, "ffn_size": 3 * H,
}  # fmt: skip
CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "GPT": {},
    "Llama": {"model": LLAMA},
    "window": {"model": {**LLAMA, "window_size": 8}},
    "parallel block, selective": {"model": {"block": "parallel"}, "parallel": {"recompute": "selective"}},
    "tp2, ZeRO-2": {"model": LLAMA, "parallel": {"tp_size": 2, "zero_stage": 2}},
    "FP8": {"model": LLAMA, "fp8": {"recipe": "tensorwise"}},
    "FP8, ZeRO-2": {"model": LLAMA, "fp8": {"recipe": "tensorwise"}, "parallel": {"zero_stage": 2}},
}


def config_of(changes: dict[str, dict[str, Any]]) -> Config:
    return Config.from_dict({name: SMALL.get(name, {}) | changes.get(name, {}) for name in {*SMALL, *changes}})


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def scaled(a: Tensor, b: Tensor) -> Tensor:
    one = meta(dtype=torch.float32)
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)


@pytest.mark.slow
def test_page_has_what_the_code_launches() -> None:
    found = run()

    stored = json.loads((RESULTS / "gpu-roofline.json").read_text())
    page = (RESULTS / "gpu-roofline.md").read_text()
    assert stored["rows"] == json.loads(json.dumps([dict(row) for row in found.rows]))
    assert table(found.rows) in page
    assert "predicted, not measured: no GPU" in page
    assert [bar.figure for bar in found.bars if not bar.is_met] == []


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_flops_of_a_layer_are_those_of_the_mfu(changes: dict[str, dict[str, Any]]) -> None:
    config = config_of(changes)

    assert is_formula(layer(partial(our_micro_batch, config)), config)


@pytest.mark.parametrize(
    "product",
    [
        lambda: meta(3, 5) @ meta(5, 7),
        lambda: torch.bmm(meta(2, 3, 5), meta(2, 5, 7)),
        lambda: torch.addmm(meta(7), meta(3, 5), meta(5, 7)),
        lambda: scaled(meta(16, 32, dtype=torch.float8_e4m3fn), meta(48, 32, dtype=torch.float8_e4m3fn)),
    ],
)
def test_flops_of_products_are_torchs(product: Callable[[], Tensor]) -> None:
    with KernelTrace() as trace:
        product()
    with FlopCounterMode(display=False) as counter:
        product()

    assert sum(kernel.flops for kernel in trace.kernels.elements()) == counter.get_total_flops() > 0


X = 2 * S * H
"""Bytes of a bf16 tensor [S, H]."""
CALLS: dict[str, tuple[Callable[[Tensor], object], list[int], int]] = {
    # the call with x [S, H], the launches of its operators, their bytes
    "sum of two": (lambda x: x + meta(S, H), [1], 3 * X),
    "square": (lambda x: x * x, [1], 2 * X),
    "view": (lambda x: x.view(H, S).t(), [], 0),
    "allocation": (torch.empty_like, [], 0),
    "expanded": (lambda x: x.copy_(meta(H).expand(S, H)), [1], X + 2 * H),
    "in place": (lambda x: x.mul_(2.0), [1], 2 * X),
    "overwritten": (lambda x: x.zero_(), [1], X),
    "product added": (lambda x: add_product_(meta(H, H, dtype=torch.float32), x, x, False), [1], 2 * 4 * H * H + X),
    "product stored": (lambda x: add_product_(meta(H, H, dtype=torch.float32), x, x, True), [1], 4 * H * H + X),
    "norm": (lambda x: rms_norm(x, meta(H), 1e-5), [1], 2 * X + 2 * H + 4 * S),
}


@pytest.mark.parametrize(("call", "launches", "num_bytes"), CALLS.values(), ids=CALLS)
def test_a_range_of_memory_counts_once(call: Callable[[Tensor], object], launches: list[int], num_bytes: int) -> None:
    x = meta(S, H)
    with KernelTrace() as trace:
        call(x)

    kernels = list(trace.kernels.elements())
    assert [kernel.launches for kernel in kernels] == launches
    assert sum(kernel.num_bytes for kernel in kernels) == num_bytes


def test_passes_add_up_to_the_layer() -> None:
    rows = layer_rows("a layer", layer(partial(our_micro_batch, config_of({"model": LLAMA}))))

    by_pass = {row["pass"]: row for row in rows if row["kernel"] == "all"}
    for column in ("launches", "MB", "GFLOP"):
        of_kernels = sum(row[column] for row in rows if row["kernel"] != "all")
        assert by_pass["both"][column] == pytest.approx(of_kernels)
        assert by_pass["forward"][column] + by_pass["backward"][column] == pytest.approx(of_kernels)
