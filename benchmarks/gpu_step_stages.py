"""The stages of the GPU benchmark that time whole training steps, or compare their losses with the CPU's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_ceilings import product_flops
from benchmarks.gpu_record import GpuStage, Row, beside
from benchmarks.gpu_stage import OUT_OF_MEMORY, Work, fill, run_stage
from benchmarks.gpu_step import (
    WARMUP,
    Step,
    host_bound_config,
    layers_that_fit,
    measure,
    model_config,
    our_config,
    our_step,
    peer_step,
    profiled_idle,
)
from benchmarks.gpu_target import GpuTarget
from megatrain.config.config import Config
from megatrain.config.load import load_config
from megatrain.telemetry.flops import peak_flops

SMALL_MODEL = Path(__file__).resolve().parent.parent / "configs" / "gpt_125m.toml"
PEER = "plain torch, compiled"
OURS = "ours, bf16"
FP8 = "ours, FP8 current"
FP8_SIDES: dict[str, dict[str, Any]] = {
    "ours, FP8 delayed": {"recipe": "tensorwise", "scaling": "delayed"},
    FP8: {"recipe": "tensorwise"},
    "ours, FP8 by row": {"recipe": "rowwise"},
}
NUM_MICROBATCHES = (1, 8)
ON_DEVICE, ON_CPU = "device", "cpu"
PARITY_STEPS = 10
PARITY_BOUND = 2e-2
"""The relative bound on each of ten losses in bf16. tests/gpu/test_gpu_smoke.py has the same bound for small models."""


def whole_steps(stage: GpuStage, target: GpuTarget) -> None:
    """Time megatrain's steps and the peer's, with one micro-batch and with several.

    A side that does not fit into memory is repeated with fewer layers. The other sides are not, so sides may have
    different layers; the MFU is comparable all the same.
    """
    for num_microbatches in NUM_MICROBATCHES:
        _fit(stage, target, num_microbatches, OURS, our_config)
        _fit(stage, target, num_microbatches, FP8, partial(our_config, fp8=FP8_SIDES[FP8]))
        _fit(stage, target, num_microbatches, PEER, None)


def fp8_steps(stage: GpuStage, target: GpuTarget) -> None:
    """Time the other ways to scale in FP8."""
    for name, fp8 in FP8_SIDES.items():
        if name != FP8:
            _fit(stage, target, 1, name, partial(our_config, fp8=fp8))


def offload(stage: GpuStage, target: GpuTarget) -> None:
    """Time a model of few layers with its activations on the GPU and on the host."""
    num_layers = target.num_offload_layers
    model = model_config(num_layers, **target.model)
    base = ""
    for recompute in ("selective", "full"):
        for num_offloaded in (0, num_layers // 2, num_layers - 1):
            parallel = {"recompute": recompute, "offload_layers": num_offloaded}
            name = f"{recompute} recompute, {num_offloaded} offloaded"
            base = base or name
            _side(stage, target, model, name, partial(our_config, parallel=parallel))
            _compare(stage, "seconds", base)


def _fit(
    stage: GpuStage, target: GpuTarget, num_microbatches: int, name: str, config_of: Callable[..., Config] | None
) -> None:
    """Time one side with as many layers as fit."""
    model = model_config(1, **target.model)
    num_layers = target.num_layers or layers_that_fit(
        torch.cuda.get_device_properties(0).total_memory, model, num_microbatches
    )
    while True:
        row = _side(stage, target, {**model, "num_layers": num_layers}, name, config_of, num_microbatches)
        _compare(stage, "mfu", OURS, "micro-batches")
        if num_layers == 1 or not str(row["seconds"]).startswith(OUT_OF_MEMORY):
            return
        num_layers -= max(1, num_layers // 5)


def _side(
    stage: GpuStage,
    target: GpuTarget,
    model: dict[str, Any],
    name: str,
    config_of: Callable[..., Config] | None,
    num_microbatches: int = 1,
) -> Row:
    """Time one side. config_of: from (model, number of micro-batches); None: the peer."""
    tokens = _tokens(model["vocab_size"], model["seq_len"], num_microbatches)
    config = (config_of or our_config)(model, num_microbatches)
    side = partial(_peer_side, target, model) if config_of is None else partial(_our_side, target, config)

    def figures() -> dict[str, Any]:
        with side() as step:
            found = asdict(measure(target, step, config, tokens, _peak(target)))
            return found | {"idle": profiled_idle(step, tokens)}

    row = stage.row(side=name, layers=model["num_layers"], **{"micro-batches": num_microbatches})
    fill(stage, row, "seconds", figures, is_ours=config_of is not None)
    return row


def host_bound_steps(stage: GpuStage, target: GpuTarget) -> None:
    """Time the same steps launched by Python and replayed from CUDA graphs, and record their losses."""
    small = load_config(SMALL_MODEL, list(target.small_model)).config
    base = "launched by Python"
    sides = {
        base: host_bound_config(small, cuda_graphs=False),
        "CUDA graphs": host_bound_config(small, cuda_graphs=True),
    }
    tokens = _tokens(small.model.vocab_size, small.model.seq_len, sides[base].batch.global_batch_size)
    for name, config in sides.items():
        fill(stage, stage.row(side=name), "seconds", partial(_host_bound_figures, target, config, tokens), is_ours=True)
        _compare(stage, "seconds", base)
    # the profiler runs after all timing, because it affects launches, which this stage measures
    for name, config in sides.items():
        fill(stage, stage.row(side=name), "idle", partial(_host_bound_idle, target, config, tokens), is_ours=True)


def _host_bound_figures(target: GpuTarget, config: Config, tokens_SB: Tensor) -> dict[str, Any]:
    with _our_side(target, config) as step:
        return asdict(measure(target, step, config, tokens_SB, _peak(target)))


def _host_bound_idle(target: GpuTarget, config: Config, tokens_SB: Tensor) -> float | str:
    with _our_side(target, config) as step:
        for _ in range(WARMUP):
            step(tokens_SB)
        return profiled_idle(step, tokens_SB)


def _compare(stage: GpuStage, column: str, base: str, same: str = "layers") -> None:
    beside(stage.content["found"], column, base, same)
    stage.record.write()


@contextmanager
def _our_side(target: GpuTarget, config: Config) -> Iterator[Step]:
    step, trainer = our_step(config, target.device)
    with closing(trainer):
        yield step


@contextmanager
def _peer_side(target: GpuTarget, model: dict[str, Any]) -> Iterator[Step]:
    yield peer_step(model, target.device, target.compiled)


def _peak(target: GpuTarget) -> float:
    """Return the peak FLOP/s for MFU: from the data sheet, or for an unknown device the rate of a large product."""
    return (peak_flops(torch.cuda.get_device_name()) if target.is_gpu else None) or product_flops(target)


def _tokens(vocab_size: int, seq_len: int, num_samples: int) -> Tensor:
    """Return token ids [S + 1, B], the same for every side."""
    return torch.randint(0, vocab_size, (seq_len + 1, num_samples), generator=torch.Generator().manual_seed(0))


def parity(stage: GpuStage, target: GpuTarget) -> None:
    """Train the 125M configuration on both devices, with short samples so that the CPU needs only seconds."""
    changes = ["--model.seq_len=256", *target.small_model, "--batch.micro_batch_size=1", "--batch.global_batch_size=1"]
    config = load_config(SMALL_MODEL, changes).config
    generator = torch.Generator().manual_seed(0)
    shape = (config.model.seq_len + 1, 1)
    batches = [torch.randint(0, config.model.vocab_size, shape, generator=generator) for _ in range(PARITY_STEPS)]
    losses: dict[str, list[float]] = {}
    for side, device in ((ON_DEVICE, target.device), (ON_CPU, torch.device("cpu"))):
        step, trainer = our_step(config, device)
        with closing(trainer):
            losses[side] = [step(tokens) for tokens in batches]
        stage.change(found=dict(losses))
    differences = [abs(a - b) / b for a, b in zip(losses[ON_DEVICE], losses[ON_CPU], strict=True)]
    stage.change(found={"differences of the losses, relative": differences, "bound": PARITY_BOUND, **losses})
    if not all(difference <= PARITY_BOUND for difference in differences):
        stage.fail(f"losses differ by more than {PARITY_BOUND}: {differences}")


STAGES: dict[str, Work] = {
    "Whole steps": whole_steps,
    "Whole steps, other scales in FP8": fp8_steps,
    "Ten steps of 125M beside the CPU": parity,
    "125M by micro-batches of one sample": host_bound_steps,
    "Activation offload": offload,
}


if __name__ == "__main__":
    sys.exit(run_stage(STAGES))
