"""Rotary positions of a model: its frequencies, and cos and sin tables, one for each length, device and dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.config.model import ModelConfig
from megatrain.ops.precision import accumulate_dtype
from megatrain.ops.rotary import inverse_frequencies, rotary_table


class RotaryPositions:
    """The rotary positions that all blocks of a model part use.

    There are no parameters and no buffers, because nothing of it belongs in a checkpoint.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._frequency = inverse_frequencies(
            config.resolved_head_dim,
            config.rope_theta,
            config.rope_scaling,
            config.rope_scaling_factor,
            config.rope_low_freq_factor,
            config.rope_high_freq_factor,
            config.rope_original_seq_len,
        )
        self._tables: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def table(self, seq_len: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [S, 1, 1, D / 2], in fp32 for half-precision x."""
        dtype = accumulate_dtype(dtype)
        key = (seq_len, device, dtype)
        if key not in self._tables:
            self._tables[key] = rotary_table(seq_len, self._frequency, device, dtype)
        return self._tables[key]
