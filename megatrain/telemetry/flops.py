"""How many floating-point operations a token costs, and which fraction of the device's peak a run reaches (MFU).

Counted: the matrix multiplications of the model, 2*m*n*k each. Attention counts exactly the (query, key) pairs that
causality and the window allow, so that skipped work does not raise MFU (MegaScale counts its window the same way).
Document boundaries inside a sample do not change this number, because they are a property of the data. Backward counts
twice the forward. The output head counts with the configured `vocab_size`, because padding is no useful work. Not
counted: recomputation (as in PaLM's MFU), embedding look-up, norms, biases, softmax and rotary. With the FLOPs of a
token and the peak of a device, a throughput becomes the MFU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from megatrain.config.config import Config
from megatrain.config.model import ModelConfig
from megatrain.config.model_products import products_per_pair, products_per_picture, products_per_token, widths_of
from megatrain.config.picture_share import picture_share

if TYPE_CHECKING:
    import torch

_BACKWARD_TO_FORWARD = 2

_PEAK_TFLOPS_BF16: dict[str, float] = {
    "A10": 125.0,
    "A100": 312.0,
    "A30": 165.0,
    "A40": 149.7,
    "A800": 312.0,
    "B100": 1750.0,
    "B200": 2250.0,
    "GB200": 2500.0,
    "GH200": 989.0,
    "H100": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H200": 989.0,
    "H200 NVL": 835.0,
    "H800": 989.0,
    "L4": 121.0,
    "L40": 181.0,
    "L40S": 362.0,
    "MI250X": 383.0,
    "MI300X": 1307.0,
    "RTX 4090": 165.2,
    "RTX 6000 Ada": 364.2,
}
"""Dense bf16 peaks, TFLOP/s, from the vendors' data sheets (half of the figures "with sparsity")."""


def attended_pairs(seq_len: int, window_size: int = 0) -> int:
    """Return the number of (query, key) pairs of causal attention in a sequence: each token attends to itself and all
    tokens before it.

    Units: `window_size` is the number of tokens that a token attends to, including itself; 0: all.
    """
    window = min(window_size or seq_len, seq_len)
    return window * (window + 1) // 2 + (seq_len - window) * window


def forward_flops_per_token(model: ModelConfig, pictures_per_sample: float = 1.0) -> float:
    """Return the FLOPs of one token's forward pass, averaged over a full sequence with its picture.

    pictures_per_sample: below 1 if some samples have none; no effect on a model without pictures.
    """
    shared = products_per_pair(model) * _pairs_of_all_layers(model) + products_per_picture(model) * pictures_per_sample
    return 2 * (products_per_token(model) + shared / model.seq_len)


def training_flops_per_token(model: ModelConfig, pictures_per_sample: float = 1.0) -> float:
    """Return the FLOPs of one token's forward and backward pass; recomputation is not counted."""
    return (1 + _BACKWARD_TO_FORWARD) * forward_flops_per_token(model, pictures_per_sample)


def flops_formula(model: ModelConfig, pictures_per_sample: float = 1.0) -> str:
    """Return one line with the formula for the FLOPs of a token of this model, and the result."""
    span = f"window {model.window_size}, causal" if model.has_window else "causal"
    if model.has_window and model.full_attention_every:
        span += f", no window in one of {model.full_attention_every} layers, mean of layers"
    widths = widths_of(model)
    pairs = _pairs_of_all_layers(model) / model.num_layers
    flops = training_flops_per_token(model, pictures_per_sample=pictures_per_sample)
    picture = f" + {pictures_per_sample:g}*{products_per_picture(model)} of pictures/S" if model.has_pictures else ""
    return (
        f"FLOPs/token = 3 * 2 * (layers * (h*(2q+2kv) + {widths.num_mlp_matrices}*h*ffn + 2*q*pairs/S) + h*vocab"
        f"{picture}) = {flops:.4g}, with h={model.hidden_size} q={widths.query}"
        f" kv={widths.kv} ffn={model.resolved_ffn_size} layers={model.num_layers} vocab={model.vocab_size} (unpadded)"
        f" S={model.seq_len} pairs={pairs:.10g} ({span}); backward = 2 * forward, recompute not counted"
    )


def _pairs_of_all_layers(model: ModelConfig) -> int:
    return sum(attended_pairs(model.seq_len, model.window_of(layer)) for layer in range(model.num_layers))


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a device in FLOP/s from its name, or None if it is not in the table."""
    for name in sorted(_PEAK_TFLOPS_BF16, key=len, reverse=True):  # "H100 PCIe" before "H100"
        if name.lower() in device_name.lower():
            return _PEAK_TFLOPS_BF16[name] * 1e12
    return None


def mfu(tokens_per_s_per_gpu: float, flops_per_token: float, peak: float) -> float:
    """Return the model FLOPs utilization as a fraction of 1.

    Units: `peak` in FLOP/s, from `peak_flops`.
    """
    return tokens_per_s_per_gpu * flops_per_token / peak


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """The FLOPs of a token of `model`, and the peak of a device in FLOP/s; `peak` is None if it is not known."""

    model: ModelConfig
    peak: float | None
    formula: str
    """One line on how both are counted."""

    def flops_per_token(self, seq_len: int, pictures_per_sample: float = 0.0) -> float:
        """Return the mean FLOPs of a token's forward and backward pass in samples of this length."""
        without, whole = _flops_per_token(self.model, seq_len)
        return without + pictures_per_sample * (whole - without)


@lru_cache(maxsize=64)
def _flops_per_token(model: ModelConfig, seq_len: int) -> tuple[float, float]:
    """Return the FLOPs of a token in a sample of this length without a picture, and with one."""
    sized = replace(model, seq_len=seq_len)
    without, whole = (training_flops_per_token(sized, pictures_per_sample=count) for count in (0.0, 1.0))
    return without, whole


def compute_cost(config: Config, device_name: str) -> ComputeCost:
    """Return the FLOPs of a token of this model, and the peak of a device with this name. Units: peak in FLOP/s."""
    precision = config.train.precision
    # The table holds bf16 peaks only.
    peak, source = peak_flops(device_name) if precision == "bf16" else None, f"{device_name}, dense {precision}"
    if config.telemetry.peak_tflops:
        peak, source = config.telemetry.peak_tflops * 1e12, "telemetry.peak_tflops"
    if peak is None:
        known = f"not printed: no {precision} peak is known for {device_name}; set telemetry.peak_tflops"
    else:
        known = f"tokens/s/device * FLOPs/token / peak, peak = {peak / 1e12:g} TFLOP/s ({source})"
    formula = flops_formula(replace(config.model, seq_len=config.seq_len), picture_share(config))
    return ComputeCost(config.model, peak, f"{formula}; MFU {known}")


def device_name(device: torch.device) -> str:
    """Return the name of the device; for a GPU its product name."""
    if device.type != "cuda":
        return str(device.type)
    import torch

    return str(torch.cuda.get_device_name(device))
