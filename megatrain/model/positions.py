"""Rotary positions of a model: cos and sin tables, one for each length, device and dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.config.model import ModelConfig
from megatrain.model.frequencies import rotary_frequencies
from megatrain.ops.precision import accumulate_dtype
from megatrain.ops.rotary import rotary_table


class RotaryPositions:
    """The rotary positions that layers of one kind in a model part use.

    There are no parameters and no buffers, because nothing of it belongs in a checkpoint.
    """

    def __init__(self, config: ModelConfig, *, is_local: bool = False) -> None:
        """is_local: whether a window limits what these layers attend to."""
        self._config = config
        self._is_local = is_local
        self._tables: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def table(self, seq_len: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [S, 1, 1, U / 2] of U rotated units, in fp32 for half-precision x."""
        dtype = accumulate_dtype(dtype)
        key = (seq_len, device, dtype)
        if key not in self._tables:
            found = rotary_frequencies(self._config, seq_len, is_local=self._is_local)
            self._tables[key] = rotary_table(seq_len, found.angle, device, dtype, found.factor)
        return self._tables[key]
