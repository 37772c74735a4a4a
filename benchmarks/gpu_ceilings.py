"""Upper bounds for all operations on a device: how fast it copies, and how fast it multiplies large matrices."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.gpu_record import GpuStage
from benchmarks.gpu_stage import fill
from benchmarks.gpu_target import GpuTarget
from megatrain.ops.quantization import E4M3

CEILINGS = "Ceilings"
BANDWIDTH = "copy, TB/s"


def ceilings(stage: GpuStage, target: GpuTarget) -> None:
    """Measure each ceiling. Needs no kernels of megatrain."""
    measured: dict[str, Callable[[], float]] = {
        BANDWIDTH: lambda: copy_bandwidth(target) / 1e12,
        "bf16 product, TFLOP/s": lambda: product_flops(target) / 1e12,
        "FP8 product, fast accumulation, TFLOP/s": lambda: fp8_product_flops(target, is_fast=True) / 1e12,
        "FP8 product, TFLOP/s": lambda: fp8_product_flops(target, is_fast=False) / 1e12,
    }
    found = stage.content["found"] or {}
    stage.change(found=found)
    for name, measure in measured.items():
        fill(stage, found, name, measure, is_ours=False)


def copy_bandwidth(target: GpuTarget) -> float:
    """Return bytes a second, read and written, of a copy on the device: the ceiling of memory-bound work."""
    source = torch.empty(target.copy_bytes, dtype=torch.int8, device=target.device)
    copy = torch.empty_like(source)
    return 2 * source.numel() / target.seconds_of(lambda: copy.copy_(source))


def product_flops(target: GpuTarget) -> float:
    """Return FLOP a second of a product of two square bf16 matrices of random numbers."""
    size = target.product_size
    a, b = (torch.randn(size, size, device=target.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / target.seconds_of(lambda: torch.mm(a, b, out=out))


def fp8_product_flops(target: GpuTarget, *, is_fast: bool) -> float:
    """Return FLOP a second of a product of two square matrices in 8 bits with one scale each, and a bf16 result.

    is_fast: sums are kept in fewer bits, as in forward.
    """
    size = target.product_size
    a, b = (torch.randn(size, size, device=target.device).to(E4M3) for _ in range(2))
    one = torch.ones((), device=target.device)

    def work() -> object:
        # the second matrix by columns, the only order that the library multiplies
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=is_fast)

    return 2 * size**3 / target.seconds_of(work)
