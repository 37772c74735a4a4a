"""The stages of the GPU benchmark that time whole training steps, or compare their losses with the CPU's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_record import Row, Stage, beside
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
from benchmarks.gpu_timing import product_flops
from megatrain.config import load_config
from megatrain.config.config import Config
from megatrain.telemetry.flops import peak_flops

SMALL_MODEL = Path(__file__).resolve().parent.parent / "configs" / "gpt_125m.toml"
PEER = "plain torch, compiled"
OURS = "ours, bf16"
FP8_SIDES: dict[str, dict[str, Any]] = {
    "ours, FP8 delayed": {"recipe": "tensorwise", "scaling": "delayed"},
    "ours, FP8 current": {"recipe": "tensorwise"},
    "ours, FP8 by row": {"recipe": "rowwise"},
}
OFFLOAD_LAYERS = 8
PARITY_STEPS = 10
PARITY_BOUND = 2e-2
"""The relative bound on each of ten losses in bf16. tests/gpu/test_gpu_smoke.py has the same bound for small models."""


def whole_steps(stage: Stage) -> None:
    """Time megatrain's steps and the peer's on one model. If one does not fit into memory, repeat with fewer layers."""
    num_layers = layers_that_fit(torch.cuda.get_device_properties(0).total_memory, model_config(1))
    while True:
        model = model_config(num_layers)
        pair = [_side(stage, model, OURS, our_config(model)), _side(stage, model, PEER, None)]
        if num_layers == 1 or not any(str(row["seconds"]).startswith(OUT_OF_MEMORY) for row in pair):
            break
        num_layers -= max(1, num_layers // 5)
    for name, fp8 in FP8_SIDES.items():
        _side(stage, model, name, our_config(model, fp8=fp8))


def offload(stage: Stage) -> None:
    """Time a model of few layers with its activations on the GPU and on the host."""
    model = model_config(OFFLOAD_LAYERS)
    base = ""
    for recompute in ("selective", "full"):
        for num_offloaded in (0, OFFLOAD_LAYERS // 2, OFFLOAD_LAYERS - 1):
            parallel = {"recompute": recompute, "offload_layers": num_offloaded}
            name = f"{recompute} recompute, {num_offloaded} offloaded"
            base = base or name
            _side(stage, model, name, our_config(model, parallel=parallel), base)


def _side(stage: Stage, model: dict[str, Any], name: str, config: Config | None, base: str = OURS) -> Row:
    """Time one side. `config` None: the peer."""
    tokens = _tokens(model["vocab_size"], model["seq_len"], 1)
    side = partial(_peer_side, model) if config is None else partial(_our_side, config)

    def figures() -> dict[str, Any]:
        with side() as step:
            found = asdict(measure(step, config or our_config(model), tokens, _peak()))
            return found | {"idle": profiled_idle(step, tokens)}

    row = stage.row(side=name, layers=model["num_layers"])
    fill(stage, row, "seconds", figures, is_ours=config is not None)
    _compare(stage, base)
    return row


def host_bound_steps(stage: Stage) -> None:
    """Time the same steps launched by Python and replayed from CUDA graphs, and record their losses."""
    small = load_config(SMALL_MODEL, []).config
    base = "launched by Python"
    sides = {
        base: host_bound_config(small, cuda_graphs=False),
        "CUDA graphs": host_bound_config(small, cuda_graphs=True),
    }
    tokens = _tokens(small.model.vocab_size, small.model.seq_len, sides[base].batch.global_batch_size)
    for name, config in sides.items():
        fill(stage, stage.row(side=name), "seconds", partial(_host_bound_figures, config, tokens), is_ours=True)
        _compare(stage, base)
    # the profiler runs after all timing, because it affects launches, which this stage measures
    for name, config in sides.items():
        fill(stage, stage.row(side=name), "idle", partial(_host_bound_idle, config, tokens), is_ours=True)


def _host_bound_figures(config: Config, tokens_SB: Tensor) -> dict[str, Any]:
    with _our_side(config) as step:
        return asdict(measure(step, config, tokens_SB, _peak()))


def _host_bound_idle(config: Config, tokens_SB: Tensor) -> float | str:
    with _our_side(config) as step:
        for _ in range(WARMUP):
            step(tokens_SB)
        return profiled_idle(step, tokens_SB)


def _compare(stage: Stage, base: str) -> None:
    beside(stage.content["found"], "seconds", base)
    stage.record.write()


@contextmanager
def _our_side(config: Config) -> Iterator[Step]:
    step, trainer = our_step(config, torch.device("cuda"))
    with closing(trainer):
        yield step


@contextmanager
def _peer_side(model: dict[str, Any]) -> Iterator[Step]:
    yield peer_step(model, torch.device("cuda"), is_compiled=True)


def _peak() -> float:
    """Return the peak FLOP/s for MFU: from the data sheet, or for an unknown GPU the rate of a large product."""
    return peak_flops(torch.cuda.get_device_name()) or product_flops()


def _tokens(vocab_size: int, seq_len: int, num_samples: int) -> Tensor:
    """Return token ids [S + 1, B], the same for every side."""
    return torch.randint(0, vocab_size, (seq_len + 1, num_samples), generator=torch.Generator().manual_seed(0))


def parity(stage: Stage) -> None:
    """Train the 125M configuration on both devices, with short samples so that the CPU needs only seconds."""
    changes = ["--model.seq_len=256", "--batch.micro_batch_size=1", "--batch.global_batch_size=1"]
    config = load_config(SMALL_MODEL, changes).config
    generator = torch.Generator().manual_seed(0)
    shape = (config.model.seq_len + 1, 1)
    batches = [torch.randint(0, config.model.vocab_size, shape, generator=generator) for _ in range(PARITY_STEPS)]
    losses: dict[str, list[float]] = {}
    for device in ("cuda", "cpu"):
        step, trainer = our_step(config, torch.device(device))
        with closing(trainer):
            losses[device] = [step(tokens) for tokens in batches]
        stage.change(found=dict(losses))
    differences = [abs(a - b) / b for a, b in zip(losses["cuda"], losses["cpu"], strict=True)]
    stage.change(found={"differences of the losses, relative": differences, "bound": PARITY_BOUND, **losses})
    if not all(difference <= PARITY_BOUND for difference in differences):
        stage.fail(f"losses differ by more than {PARITY_BOUND}: {differences}")


STAGES: dict[str, Work] = {
    "Whole steps": whole_steps,
    "Ten steps of 125M beside the CPU": parity,
    "125M by micro-batches of one sample": host_bound_steps,
    "Activation offload": offload,
}


if __name__ == "__main__":
    sys.exit(run_stage(STAGES))
