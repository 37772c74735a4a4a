"""The device that the GPU benchmark measures, and the sizes that it measures: a GPU, or a rehearsal on a CPU.

A rehearsal runs every stage but the build, with tiny sizes and without compilers. It shows that the benchmark works,
and its figures mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu_operator_case import Operation, Sizes, compiled
from benchmarks.gpu_timing import Work, seconds_of, seconds_on_cpu


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """A device and sizes. compiled: compiles a peer's function. model: changes of the model with the width of 8B."""

    device: torch.device
    sizes: Sizes
    seconds_of: Callable[[Work], float]
    compiled: Callable[[Operation], Operation]
    copy_bytes: int
    product_size: int
    """The rows and columns of the matrices whose product is a ceiling."""
    num_layers: int = 0
    """Of the model of whole steps; 0: as many as fit into memory."""
    num_offload_layers: int = 8
    model: Mapping[str, Any] = field(default_factory=dict)
    small_model: tuple[str, ...] = ()
    """Changes of the 125M configuration."""

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize()


def gpu() -> GpuTarget:
    """Return the GPU of this machine with the sizes of Llama 3 8B."""
    return GpuTarget(torch.device("cuda"), Sizes(), seconds_of, compiled, copy_bytes=1 << 30, product_size=8192)


def rehearsal() -> GpuTarget:
    """Return this machine's CPU with tiny sizes."""
    return GpuTarget(
        torch.device("cpu"),
        Sizes(tokens=32, hidden=64, ffn=96, heads=4, kv_heads=2, vocab_size=128, num_weights=64 * 64),
        seconds_on_cpu,
        compiled=lambda operation: operation,
        copy_bytes=1 << 16,
        product_size=64,
        num_layers=2,
        num_offload_layers=3,
        model={
            "seq_len": 32, "hidden_size": 64, "ffn_size": 96, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 128,
        },
        small_model=(
            "--model.vocab_size=128", "--model.hidden_size=64", "--model.num_layers=1", "--model.num_heads=4",
            "--model.seq_len=16",
        ),
    )  # fmt: skip
