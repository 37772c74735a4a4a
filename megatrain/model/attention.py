"""The attention sublayer, with norms of queries and keys over each head or over all heads together.

Shapes: S sequence, B micro-batch, H hidden, N query heads, G key-value heads, R = N / G, D head dim.

The number of heads is read from the weight's shape, so a shard with some of the groups computes only their heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.config.model import ModelConfig
from megatrain.config.variant_parameters import position_methods
from megatrain.config.variants import load_variant
from megatrain.model.context import TokenContext
from megatrain.model.frequencies import RotaryPositions
from megatrain.model.linear import Linear, Projection
from megatrain.model.norm import RmsNorm, ZeroCenteredRmsNorm
from megatrain.model.variant import build_variant
from megatrain.ops.attention import AttentionPattern, softmax_attention
from megatrain.ops.precision import accumulate_dtype
from megatrain.ops.rotary import split_partly_rotated, split_rotated_

AttendHeads = Callable[[Tensor, Tensor, Tensor, AttentionPattern], Tensor]
"""A function like softmax_attention(): takes queries, keys, values and the pattern, and returns the heads' outputs."""

Positions = RotaryPositions | TokenContext
"""The tables of rotary positions, or, for a variant's `rotate`, the context of all rows of the sequence."""


class HeadNorm(nn.Module):
    """RMSNorm over D, with one scale [D] for all heads. Every tp rank holds the scale."""

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
    """RMSNorm over all queries of a token, and over all keys of a token. Weight [G, R + 1, D]: queries, then the key.

    Replaceable submodule: `over_ranks`. Its input is the sums of squares of this rank's heads, [2, S, B, 1, 1, 1] in
    fp32 (fp64 for fp64), queries then keys.
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
        """Return `product`, the output of `qkv`, with normalized queries and keys. Shapes: both [S, B, G, R + 2, D]."""
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


class QueryKeyValue(Projection):
    """One projection with weight [G, R + 2, D, H]: for each group its queries, then its key, then its value."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        groups, head_dim = config.resolved_num_kv_heads, config.resolved_head_dim
        rows = config.num_heads // groups + 2
        self.weight = nn.Parameter(torch.empty(groups, rows, head_dim, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(groups, rows, head_dim)) if config.resolved_has_qkv_bias else None

    def forward(self, x_SBH: Tensor) -> Tensor:
        """Return queries, keys and values, [S, B, G, R + 2, D]."""
        return self.multiply(x_SBH, self.weight, self.bias).unflatten(-1, self.weight.shape[:3])


class Attention(nn.Module):
    """Self-attention, by softmax or a variant, without the output bias, which the branch adds after `branch_out`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.num_heads * config.resolved_head_dim
        self.qkv = QueryKeyValue(config)
        has_norms = config.qk_norm == "head"
        self.query_norm = HeadNorm(config) if has_norms else None
        self.key_norm = HeadNorm(config) if has_norms else None
        self.all_heads_norm = AllHeadsNorm(config) if config.qk_norm == "all_heads" else None
        self.rotates_all = config.rotated_dim == config.resolved_head_dim
        is_rotated = "rotate" in position_methods(config)
        self.positions: Any = build_variant(config, "positions", config) if is_rotated else None
        self.attend_heads = _attend_heads(config)
        self.out = Linear(width, config.hidden_size)

    def forward(self, x_SBH: Tensor, pattern: AttentionPattern, positions: Positions) -> Tensor:
        """Return the output of attention. Shapes: x and result [S, B, H], all rows of the sequence."""
        return self.out(self.attend(self.qkv(x_SBH), pattern, positions))

    def attend(self, product: Tensor, pattern: AttentionPattern, positions: Positions) -> Tensor:
        """Return the heads' outputs, side by side. `product` is the output of `qkv`; it may be overwritten.

        Shapes: product [S, B, G, R + 2, D], all rows of the sequence; result [S, B, N * D].
        """
        if self.query_norm is not None and self.key_norm is not None:
            q, k, v = product.split((product.shape[3] - 2, 1, 1), dim=3)
            product = torch.cat([self.query_norm(q), self.key_norm(k), v], dim=3)
            del q, k, v
        elif self.all_heads_norm is not None:
            product = self.all_heads_norm(product)
        if isinstance(positions, RotaryPositions):
            split = split_rotated_ if self.rotates_all else split_partly_rotated
            q, k, v = split(product, *positions.table(product.shape[0], product.device, product.dtype))
        else:
            q, k, v = product.split((product.shape[3] - 2, 1, 1), dim=3)
        del product  # attention keeps the parts that it needs
        q, k, v = q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)
        if self.positions is not None:
            q, k = self.positions.rotate(q, k, positions)
        return self.attend_heads(q, k, v, pattern)


def _attend_heads(config: ModelConfig) -> AttendHeads:
    if config.is_own("attention"):
        return softmax_attention
    found: AttendHeads | type[nn.Module] = load_variant("attention", config.attention)
    return build_variant(config, "attention") if isinstance(found, type) else found
