"""The FLOPs of a token and the peak of a device: the two numbers that turn a throughput into MFU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.config.config import Config
from megatrain.telemetry.flops import flops_formula, peak_flops, training_flops_per_token

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """The FLOPs of a token, and the peak of a device in FLOP/s; `peak` is None if it is not known."""

    flops_per_token: float
    peak: float | None
    formula: str
    """One line on how both are counted."""


def compute_cost(config: Config, device_name: str) -> ComputeCost:
    """Return the FLOPs of a token of this model, and the peak of a device with this name. Units: peak in FLOP/s."""
    precision = config.train.precision
    flops_per_token = training_flops_per_token(config.model)
    # The table holds bf16 peaks only.
    peak, source = peak_flops(device_name) if precision == "bf16" else None, f"{device_name}, dense {precision}"
    if config.telemetry.peak_tflops:
        peak, source = config.telemetry.peak_tflops * 1e12, "telemetry.peak_tflops"
    if peak is None:
        known = f"not printed: no {precision} peak is known for {device_name}; set telemetry.peak_tflops"
    else:
        known = f"tokens/s/device * FLOPs/token / peak, peak = {peak / 1e12:g} TFLOP/s ({source})"
    return ComputeCost(flops_per_token, peak, f"{flops_formula(config.model)}; MFU {known}")


def device_name(device: torch.device) -> str:
    """Return the name of the device; for a GPU its product name."""
    if device.type != "cuda":
        return str(device.type)
    import torch

    return str(torch.cuda.get_device_name(device))
