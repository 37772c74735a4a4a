"""Rotary positions: their frequencies, one function for each method that scales them to a longer context, and the
tables of cos and sin.

A frequency is the angle that each position adds to one pair of units. Shapes: U rotated units of a head; frequencies
[U / 2]. For each kind of layers, a model part has one table for each length, device and dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.config.model import ModelConfig
from megatrain.config.variants import load_variant
from megatrain.ops.precision import accumulate_dtype
from megatrain.ops.rotary import inverse_frequencies, rotary_table


@dataclass(frozen=True, slots=True)
class Frequencies:
    """Angles per position, in fp64 on the CPU, and the factor of rotated queries and keys."""

    angle: Tensor
    factor: float = 1.0


def rotary_frequencies(model: ModelConfig, seq_len: int, *, is_local: bool) -> Frequencies:
    """Return the frequencies of the layers with a window (is_local), or of the other layers.

    seq_len: the length of the sequence, on which `dynamic` depends.
    """
    if is_local and model.rope_local_theta:
        return Frequencies(inverse_frequencies(model.rotated_dim, model.rope_local_theta))
    scaling = model.rope_scaling
    stretch = SCALINGS[scaling] if model.is_own("rope_scaling") else load_variant("rope_scaling", scaling)
    found: Frequencies = stretch(model, seq_len)
    return found


def _unscaled(model: ModelConfig, seq_len: int) -> Frequencies:
    return Frequencies(inverse_frequencies(model.rotated_dim, model.rope_theta))


def _linear(model: ModelConfig, seq_len: int) -> Frequencies:
    """All angles divided by the factor (arXiv:2306.15595)."""
    return Frequencies(inverse_frequencies(model.rotated_dim, model.rope_theta) / model.rope_scaling_factor)


def _dynamic(model: ModelConfig, seq_len: int) -> Frequencies:
    """A base that grows with the length beyond the original one ("NTK-aware" scaling, arXiv:2309.00071, appendix B)."""
    num_units, factor = model.rotated_dim, model.rope_scaling_factor
    stretch = factor * max(seq_len / model.rope_original_seq_len, 1.0) - (factor - 1)
    return Frequencies(inverse_frequencies(num_units, model.rope_theta * stretch ** (num_units / (num_units - 2))))


def _yarn(model: ModelConfig, seq_len: int) -> Frequencies:
    """Divides low frequencies by the factor, keeps high ones, blends between; scales scores (arXiv:2309.00071)."""
    num_units, factor = model.rotated_dim, model.rope_scaling_factor
    angle = inverse_frequencies(num_units, model.rope_theta)

    def fractional_pair(turns: float) -> float:
        """Return the fractional index of the pair that makes `turns` full rotations in the original context."""
        wavelength = model.rope_original_seq_len / turns
        return num_units * math.log(wavelength / (2 * math.pi)) / (2 * math.log(model.rope_theta))

    first = max(math.floor(fractional_pair(model.rope_beta_fast)), 0)
    last = min(math.ceil(fractional_pair(model.rope_beta_slow)), num_units - 1)
    pair = torch.arange(num_units // 2, dtype=torch.float64, device="cpu")
    # 0.001 if first and last are the same pair, as published with the method
    stretched = ((pair - first) / (last - first or 0.001)).clamp(0.0, 1.0)
    scores = model.rope_attention_factor or 0.1 * math.log(factor) + 1.0
    return Frequencies(angle / factor * stretched + angle * (1 - stretched), scores)


def _llama3(model: ModelConfig, seq_len: int) -> Frequencies:
    """Divides low frequencies by the factor, keeps high ones, and interpolates between (published with Llama 3.1)."""
    angle = inverse_frequencies(model.rotated_dim, model.rope_theta)
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    turns = model.rope_original_seq_len * angle / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return Frequencies(angle * (kept + (1 - kept) / model.rope_scaling_factor))


SCALINGS: Mapping[str, Callable[[ModelConfig, int], Frequencies]] = {
    "none": _unscaled,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}


class RotaryPositions:
    """The rotary positions of the layers of one kind in a model part.

    It has no parameters and no buffers, because nothing here belongs in a checkpoint.
    """

    def __init__(self, config: ModelConfig, *, is_local: bool = False) -> None:
        """is_local: whether these layers have a window."""
        self._config = config
        self._is_local = is_local
        self._tables: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def table(self, seq_len: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [S, 1, 1, U / 2] of U rotated units, in fp32 if `dtype` is a half precision."""
        dtype = accumulate_dtype(dtype)
        key = (seq_len, device, dtype)
        if key not in self._tables:
            found = rotary_frequencies(self._config, seq_len, is_local=self._is_local)
            self._tables[key] = rotary_table(seq_len, found.angle, device, dtype, found.factor)
        return self._tables[key]
