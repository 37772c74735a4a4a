"""The time that each kernel of a layer needs at least on a GPU, from its bytes and FLOPs. Predicted: nothing is timed.

The layers are those of Llama 3 8B: on a rank of configs/llama3_8b.toml, and on one GPU in bf16, in FP8 and in plain
torch. The real code runs on the meta device, which needs no GPU: python -m benchmarks gpu_roofline [--write]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.bars import Bar, at_most, must_hold
from benchmarks.gpu_roofline_layers import MicroBatchKernels, layer, our_micro_batch, plain_micro_batch
from benchmarks.gpu_roofline_trace import Kernel, Kernels
from benchmarks.gpu_step import model_config, our_config
from benchmarks.result import Result
from megatrain.config.config import Config
from megatrain.config.load import load_config
from megatrain.telemetry.flops import peak_flops, training_flops_per_token
from tests.helpers.source_tree import ROOT

CONFIG = ROOT / "configs" / "llama3_8b.toml"
NUM_MICROBATCHES = 8
"""Micro-batches of a step on one GPU. One after the first is traced: it adds to the gradients of the first."""
SHARED, ONE_GPU, FP8, PLAIN = "configs/llama3_8b.toml", "one GPU, bf16", "one GPU, FP8", "one GPU, plain torch"
LAUNCHES_BAR, BYTES_BAR = 0.5, 0.5
"""Limits of the launches and bytes of a layer in bf16, divided by those of plain torch without a compiler."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peaks of a GPU, in bytes and FLOP a second; of its links in one direction."""

    name: str
    peaks: Mapping[str, float]

    def seconds(self, kernel: Kernel) -> tuple[float, str]:
        """Return the least time of a kernel, and what limits it."""
        if kernel.unit == "NVLink":
            return kernel.num_bytes / self.peaks["NVLink"], "NVLink"
        in_memory = kernel.num_bytes / self.peaks["memory"]
        computing = kernel.flops / self.peaks[kernel.unit] if kernel.flops else 0.0
        return (computing, kernel.unit) if computing > in_memory else (in_memory, "memory")


def _gpu(name: str, memory: float) -> Gpu:
    bf16 = peak_flops(name)
    assert bf16 is not None, f"no bf16 peak of {name}"
    return Gpu(name, {"memory": memory, "bf16": bf16, "FP8": 1979e12, "NVLink": 450e9})


# NVIDIA's data sheets of both, SXM: half of the FLOP/s "with sparsity", half of the 900 GB/s of both directions
GPUS = (_gpu("H100", 3.35e12), _gpu("H200", 4.8e12))


def run() -> Result:
    """Trace the layers, and predict the time of each kernel."""
    config = load_config(CONFIG).config
    model = model_config(config.model.num_layers)
    bf16 = our_config(model, NUM_MICROBATCHES)
    fp8 = our_config(model, NUM_MICROBATCHES, fp8={"recipe": "tensorwise"})
    layers = {
        SHARED: layer(partial(our_micro_batch, config)),
        ONE_GPU: layer(partial(our_micro_batch, bf16)),
        FP8: layer(partial(our_micro_batch, fp8)),
        PLAIN: layer(partial(plain_micro_batch, model)),
    }
    step = whole_step(config, layers[SHARED])
    rows = [row for case, kernels in layers.items() for row in layer_rows(case, kernels)]
    rows.append(_row(SHARED, "step", "all", step))
    return Result(
        name="gpu-roofline",
        title="The least time of each kernel of a layer on a GPU",
        command="python -m benchmarks gpu_roofline --write",
        rows=rows,
        notes=_notes(config, step),
        bars=[
            *(
                must_hold(f"{case}: the model's FLOPs of a layer are those of the MFU", is_formula(layers[case], of))
                for case, of in ((SHARED, config), (ONE_GPU, bf16), (FP8, fp8), (PLAIN, bf16))
            ),
            must_hold("the model's FLOPs of a step are those of the MFU", model_flops(step) == step_flops(config)),
            *_beside_plain(layers),
        ],
        settings={gpu.name: _peaks_text(gpu) for gpu in GPUS},
    )


def whole_step(config: Config, one_layer: MicroBatchKernels) -> Kernels:
    """Return forward and backward of a rank's step: all layers, the embedding and the head, of all micro-batches."""
    ends = our_micro_batch(config, 2).without(one_layer.times(2))
    micro_batch = one_layer.times(config.model.num_layers).plus(ends)
    return micro_batch.times(config.num_microbatches(config.layout(None))).kernels


def layer_rows(case: str, one_layer: MicroBatchKernels) -> list[dict[str, Any]]:
    """Return a row for each kernel of a layer, and one for each pass."""
    rows = []
    for name, kernels in (("forward", one_layer.forward), ("backward", one_layer.backward)):
        by_name: dict[str, Kernels] = {}
        for kernel, count in kernels.items():
            by_name.setdefault(kernel.name, Counter())[kernel] += count
        rows += [_row(case, name, kernel, found) for kernel, found in by_name.items()]
        rows.append(_row(case, name, "all", kernels))
    rows.append(_row(case, "both", "all", one_layer.kernels))
    return rows


def model_flops(kernels: Kernels) -> int:
    """Return the FLOPs without products that are computed again."""
    return sum(count * kernel.model_flops for kernel, count in kernels.items())


def is_formula(one_layer: MicroBatchKernels, config: Config) -> bool:
    """Return whether the counted FLOPs of a layer on each rank are exactly those of the formula behind the MFU."""
    tables = config.to_dict()
    flops = []
    for num_layers in (2, 3):
        tables["model"] |= {"num_layers": num_layers}
        flops.append(training_flops_per_token(Config.from_dict(tables).model))
    tokens = config.model.seq_len * config.batch.micro_batch_size
    return model_flops(one_layer.kernels) * config.parallel.tp_size == (flops[1] - flops[0]) * tokens


def step_flops(config: Config) -> float:
    """Return the FLOPs of a step on each rank, by the formula behind the MFU."""
    tokens = config.model.seq_len * config.batch.global_batch_size
    return training_flops_per_token(config.model) * tokens / config.layout(None).world_size


def _row(case: str, name: str, kernel: str, kernels: Kernels) -> dict[str, Any]:
    row: dict[str, Any] = {
        "layer of": case,
        "pass": name,
        "kernel": kernel,
        "launches": sum(count * one.launches for one, count in kernels.items()),
        "MB": sum(count * one.num_bytes for one, count in kernels.items()) / 1e6,
        "GFLOP": sum(count * one.flops for one, count in kernels.items()) / 1e9,
    }
    for gpu in GPUS:
        seconds = _seconds_by_limit(kernels, gpu)
        total = sum(seconds.values())
        limit, most = max(seconds.items(), key=lambda item: item[1])
        share = most / total if total else 1.0
        row |= {
            f"{gpu.name}, us": total * 1e6,
            f"{gpu.name}, limit": limit if len(seconds) == 1 else f"{limit} {share:.0%}",
        }
    return row


def _seconds_by_limit(kernels: Kernels, gpu: Gpu) -> dict[str, float]:
    found: dict[str, float] = {}
    for kernel, count in kernels.items():
        seconds, limit = gpu.seconds(kernel)
        found[limit] = found.get(limit, 0.0) + count * seconds
    return found


def _beside_plain(layers: Mapping[str, MicroBatchKernels]) -> list[Bar]:
    ours, plain = (_row(case, "both", "all", layers[case].kernels) for case in (ONE_GPU, PLAIN))
    return [
        at_most("launches of a layer in bf16 / of plain torch", ours["launches"] / plain["launches"], LAUNCHES_BAR),
        at_most("bytes of a layer in bf16 / of plain torch", ours["MB"] / plain["MB"], BYTES_BAR),
    ]


def _peaks_text(gpu: Gpu) -> str:
    peaks = gpu.peaks
    return (
        f"{peaks['memory'] / 1e12:g} TB/s of memory; {peaks['bf16'] / 1e12:g} TFLOP/s bf16; "
        f"{peaks['FP8'] / 1e12:g} TFLOP/s FP8; {peaks['NVLink'] / 1e9:g} GB/s NVLink"
    )


def _notes(config: Config, step: Kernels) -> list[str]:
    bounds = []
    for gpu in GPUS:
        seconds = sum(_seconds_by_limit(step, gpu).values())
        bounds.append(f"{step_flops(config) / seconds / gpu.peaks['bf16']:.0%} on {gpu.name}")
    num_microbatches = config.num_microbatches(config.layout(None))
    return [
        "predicted, not measured: no GPU",
        "peaks: NVIDIA's data sheets of H100 and H200, SXM, without sparsity, NVLink in one direction",
        "us: the greater of bytes / bandwidth and FLOPs / peak of each kernel, added up; a real kernel takes longer",
        "limit: what takes the greater time; if kernels have different limits, the one with most time, and its share",
        (
            "launches, MB, GFLOP: counted by a dispatch mode while the code runs on the meta device; one layer is a "
            "model of three layers without a model of two"
        ),
        "MB: each argument and result of an operator once; of NVLink the bytes that a rank sends",
        "GFLOP: matrix products and attention, whose backward computes the scores again",
        f"{SHARED}: rank 0 of its layout; each sample counts as one document; exchanges count as not overlapped",
        (
            f"one GPU: one after the first of {NUM_MICROBATCHES} micro-batches, with one sample of "
            f"{config.model.seq_len} tokens"
        ),
        f"{FP8}: tensorwise recipe with current scales; {PLAIN}: under autocast, without a compiler",
        (
            f"step: forward and backward of {config.model.num_layers} layers, embedding and head, {num_microbatches} "
            "micro-batches; not in it: small sums over ranks, reduction of gradients, update, gather"
        ),
        f"MFU if each kernel of this step took its least time: {', '.join(bounds)}",
    ]
