"""The stages of the GPU benchmark that time single operations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu_ceilings import BANDWIDTH, CEILINGS, ceilings
from benchmarks.gpu_operator_case import OperatorCase
from benchmarks.gpu_operator_cases import cases, products
from benchmarks.gpu_record import GpuStage, ratio
from benchmarks.gpu_stage import Work, fill, run_stage
from benchmarks.gpu_target import GpuTarget
from megatrain.ops.cross_entropy import summed_cross_entropy


def operations(stage: GpuStage, target: GpuTarget) -> None:
    """Time each memory-bound operation, and the same in plain torch, eager and compiled."""
    found = stage.record.stage(CEILINGS).content["found"]
    bandwidth = found[BANDWIDTH] * 1e12 if isinstance(found, dict) and isinstance(found.get(BANDWIDTH), float) else None
    for case in cases(target.sizes, target.device):
        operation(stage, target, case, bandwidth)


def operation(stage: GpuStage, target: GpuTarget, case: OperatorCase, bandwidth: float | None) -> None:
    """Time one operation. `bandwidth`: of a copy in bytes a second, where that is known."""
    row = stage.row(operation=case.name)
    fill(stage, row, "ours, us", lambda: target.seconds_of(case.ours()) * 1e6, is_ours=True)
    ours, theirs = row["ours, us"], case.theirs
    row["of copy bandwidth"] = ratio(case.num_bytes / bandwidth * 1e6, ours) if bandwidth else ""
    if theirs is None:
        return
    fill(stage, row, "eager, us", lambda: target.seconds_of(theirs(lambda one: one)) * 1e6, is_ours=False)
    if case.why_not_compiled:
        row["compiled, us"] = case.why_not_compiled
    fill(stage, row, "compiled, us", lambda: target.seconds_of(theirs(target.compiled)) * 1e6, is_ours=False)
    for side in ("eager", "compiled"):
        row[f"{side} / ours"] = ratio(row[f"{side}, us"], ours)
    stage.record.write()


def weight_gradients(stage: GpuStage, target: GpuTarget) -> None:
    """Time the products that add to a sum, to see whether they are as fast as a product without addition."""
    for name, flops, ways in products(target.sizes, target.device):
        row = stage.row(**{"gradient of": name})
        for way, make in ways.items():
            fill(stage, row, f"{way}, TFLOP/s", partial(_rate, target, flops, make), is_ours=way == "ours")


def _rate(target: GpuTarget, flops: int, make: Callable[[], Callable[[], object]]) -> float:
    return flops / target.seconds_of(make()) / 1e12


def loss_memory(stage: GpuStage, target: GpuTarget) -> None:
    """Measure the peak memory of cross entropy, relative to its logits."""
    tokens, vocab = target.sizes.tokens, target.sizes.vocab_size
    labels = torch.randint(0, vocab, (tokens,), device=target.device)
    logits = torch.randn(tokens, vocab, device=target.device, dtype=torch.bfloat16).requires_grad_()
    if target.is_gpu:
        before = torch.cuda.memory_allocated() - logits.nbytes
        torch.cuda.reset_peak_memory_stats()
    summed_cross_entropy(logits, labels, vocab).backward()
    if target.is_gpu:
        peak = torch.cuda.max_memory_allocated() - before
        stage.change(found={"peak / bf16 logits": peak / logits.nbytes})


STAGES: dict[str, Work] = {
    CEILINGS: ceilings,
    "Memory-bound operations": operations,
    "Cross entropy, memory": loss_memory,
    "Weight gradients added in fp32": weight_gradients,
}


if __name__ == "__main__":
    sys.exit(run_stage(STAGES, without_kernels=[CEILINGS]))
