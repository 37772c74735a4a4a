"""Norms of queries and keys, over each head or over all heads together.

Shapes: S sequence, B micro-batch, N query heads, G key-value heads, R = N / G, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.config.model import ModelConfig
from megatrain.model.norm import RmsNorm, ZeroCenteredRmsNorm
from megatrain.ops.precision import accumulate_dtype


class HeadNorm(nn.Module):
    """RMSNorm over D, with one scale [D] for all heads, which every tp rank holds."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kind = ZeroCenteredRmsNorm if config.norm == "rmsnorm_zero_centered" else RmsNorm
        self.normalize = kind.normalize
        self.weight = nn.Parameter(torch.empty(config.resolved_head_dim))
        self.eps = config.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized heads. Shapes: x and result [..., D]."""
        return self.normalize(x, self.weight, self.eps)[0]


class AllHeadsNorm(nn.Module):
    """RMSNorm over all queries of a token, and over all its keys, with weight [G, R + 1, D]: queries, then the key.

    Point: `over_ranks`, which gets the sums of squares of the heads that are here, [2, S, B, 1, 1, 1] in fp32 (fp64 for
    fp64), queries then keys.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        groups, head_dim = config.resolved_num_kv_heads, config.resolved_head_dim
        self.weight = nn.Parameter(torch.empty(groups, config.num_heads // groups + 1, head_dim))
        self.over_ranks = nn.Identity()
        self.eps = config.norm_eps
        self.is_zero_centered = config.norm == "rmsnorm_zero_centered"
        self.widths = (config.num_heads * head_dim, groups * head_dim)

    def forward(self, product: Tensor) -> Tensor:
        """Return the product with normalized queries and keys. Shapes: product and result [S, B, G, R + 2, D]."""
        heads, v = product.split((product.shape[3] - 1, 1), dim=3)
        wide = heads.to(accumulate_dtype(product.dtype))
        weight = self.weight.to(wide.dtype) + 1 if self.is_zero_centered else self.weight
        queries_and_keys = wide.split((wide.shape[3] - 1, 1), dim=3)
        sums = torch.stack([part.square().sum((2, 3, 4), keepdim=True) for part in queries_and_keys])
        normed = [
            part * (total / width + self.eps).rsqrt()
            for part, total, width in zip(queries_and_keys, self.over_ranks(sums), self.widths, strict=True)
        ]
        return torch.cat([(torch.cat(normed, dim=3) * weight).to(product.dtype), v], dim=3)
