"""The attention sublayer.

Shapes: S sequence, B micro-batch, H hidden, N query heads, G key-value heads, R = N / G, D head dim.

The number of heads is read from the weight's shape, so a weight with only some of the groups computes only their heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.config.model import ModelConfig
from megatrain.model.linear import Linear, Projection
from megatrain.model.positions import RotaryPositions
from megatrain.ops.attention import AttentionPattern, causal_attention
from megatrain.ops.normalization import rms_norm
from megatrain.ops.rotary import split_rotated_


class QueryKeyValue(Projection):
    """One projection with weight [G, R + 2, D, H]: for each group its queries, then its key, then its value."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        groups, head_dim = config.resolved_num_kv_heads, config.resolved_head_dim
        rows = config.num_heads // groups + 2
        self.weight = nn.Parameter(torch.empty(groups, rows, head_dim, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(groups, rows, head_dim)) if config.resolved_has_qkv_bias else None

    def forward(self, x_SBH: Tensor) -> Tensor:
        """Return the product [S, B, G, R + 2, D]."""
        return self.multiply(x_SBH, self.weight, self.bias).unflatten(-1, self.weight.shape[:3])


class HeadNorm(nn.Module):
    """RMSNorm over D, with one scale [D] for all heads, which every tp rank holds."""

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(head_dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized heads. Shapes: x and result [..., D]."""
        return rms_norm(x, self.weight, self.eps)[0]


class Attention(nn.Module):
    """Causal self-attention without its output bias, which the branch adds after summing."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.num_heads * config.resolved_head_dim
        self.qkv = QueryKeyValue(config)
        has_norms = config.qk_norm == "head"
        self.query_norm = HeadNorm(config.resolved_head_dim, config.norm_eps) if has_norms else None
        self.key_norm = HeadNorm(config.resolved_head_dim, config.norm_eps) if has_norms else None
        self.out = Linear(width, config.hidden_size)

    def forward(self, x_SBH: Tensor, pattern: AttentionPattern, positions: RotaryPositions | None) -> Tensor:
        """Return what attention adds to the stream. Shapes: x and result [S, B, H], the whole sequence."""
        return self.out(self.attend(self.qkv(x_SBH), pattern, positions))

    def attend(self, product: Tensor, pattern: AttentionPattern, positions: RotaryPositions | None) -> Tensor:
        """Return the heads' outputs, side by side. May overwrite `product`.

        Shapes: product [S, B, G, R + 2, D], the whole sequence; result [S, B, N * D].
        """
        if self.query_norm is not None and self.key_norm is not None:
            q, k, v = product.split((product.shape[3] - 2, 1, 1), dim=3)
            product = torch.cat([self.query_norm(q), self.key_norm(k), v], dim=3)
            del q, k, v
        if positions is None:
            q, k, v = product.split((product.shape[3] - 2, 1, 1), dim=3)
        else:
            q, k, v = split_rotated_(product, *positions.table(product.shape[0], product.device, product.dtype))
        del product  # attention itself keeps the parts that it needs
        return causal_attention(q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3), pattern)
