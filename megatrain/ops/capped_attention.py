"""Causal attention with a soft cap on its scores, computed in blocks of queries.

The fused kernels of torch's scaled_dot_product_attention cannot cap scores. So the scores of one block of queries at a
time are written to memory, in forward and again in backward. Memory grows with S, not with S * S.
Shapes: S sequence, B micro-batch, G key-value heads, R queries of a group, D head dim, Q queries of a block, K the keys
to which some queries of the block attend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.ops.documents import PackedDocuments
from megatrain.ops.precision import accumulate_dtype

_BLOCK = 256
"""Queries of a block: the scores of 64 heads and 8,192 keys are 0.5 GiB in fp32."""


class CappedScores(NamedTuple):
    """How scores are computed, and to which keys a query attends. window_size: 0 for all keys up to the query."""

    scale: float
    cap: float
    window_size: int
    documents: PackedDocuments | None


def capped_attention(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, scores: CappedScores) -> Tensor:
    """Return softmax(cap * tanh(q k' * scale / cap)) v over the keys of each query. Softmax is in fp32 or wider.

    Saves q, k and v for backward. Shapes: q [S, B, N, D]; k and v [S, B, G, D], N a multiple of G; result [S, B, N, D].
    """
    return _CappedAttention.apply(q_SBND, k_SBGD, v_SBGD, scores)


class _CappedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, scores: CappedScores) -> Tensor:
        ctx.scores = scores
        ctx.save_for_backward(q_SBND, k_SBGD, v_SBGD)
        k_BG1SD, v_BG1SD = _by_group(k_SBGD, 1), _by_group(v_SBGD, 1)
        q_BGRSD = _by_group(q_SBND, q_SBND.shape[2] // k_SBGD.shape[2])
        out_SBND = torch.empty(q_SBND.shape, dtype=q_SBND.dtype, device=q_SBND.device)
        out_BGRSD = _by_group(out_SBND, q_BGRSD.shape[2])
        for queries, keys in _blocks(q_SBND, scores.window_size):
            weights, _ = _weights(q_BGRSD[..., queries, :], k_BG1SD[..., keys, :], scores, queries, keys)
            out_BGRSD[..., queries, :] = weights.to(v_SBGD.dtype) @ v_BG1SD[..., keys, :]
        return out_SBND

    @staticmethod
    def backward(ctx: Any, grad_SBND: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_SBND, k_SBGD, v_SBGD = ctx.saved_tensors
        scores, num_queries = ctx.scores, q_SBND.shape[2] // k_SBGD.shape[2]
        q, k, v = _by_group(q_SBND, num_queries), _by_group(k_SBGD, 1), _by_group(v_SBGD, 1)
        grad, wide = _by_group(grad_SBND, num_queries), accumulate_dtype(q.dtype)
        grad_q_SBND = torch.empty(q_SBND.shape, dtype=q.dtype, device=q.device)
        grad_q = _by_group(grad_q_SBND, num_queries)
        # every block adds to these sums, so they stay in the wide dtype until the last block
        grad_k_SBGD, grad_v_SBGD = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k_SBGD, v_SBGD))
        grad_k, grad_v = _by_group(grad_k_SBGD, 1), _by_group(grad_v_SBGD, 1)
        for queries, keys in _blocks(q_SBND, scores.window_size):
            q_block, k_block, grad_block = q[..., queries, :], k[..., keys, :], grad[..., queries, :].to(wide)
            weights, tanh = _weights(q_block, k_block, scores, queries, keys)
            grad_v[..., keys, :] += (weights.transpose(-1, -2) @ grad_block).sum(2, keepdim=True)
            grad_weights = grad_block @ v[..., keys, :].to(wide).transpose(-1, -2)
            projection = (grad_weights * weights).sum(-1, keepdim=True)
            grad_scores = weights.mul_(grad_weights - projection).mul_(1 - tanh * tanh).mul_(scores.scale)
            grad_q[..., queries, :] = grad_scores @ k_block.to(wide)
            grad_k[..., keys, :] += (grad_scores.transpose(-1, -2) @ q_block.to(wide)).sum(2, keepdim=True)
        return grad_q_SBND, grad_k_SBGD.to(k.dtype), grad_v_SBGD.to(v.dtype), None


def _by_group(x_SBND: Tensor, num_queries: int) -> Tensor:
    """Return a view [B, G, R, S, D] of heads [S, B, N, D], R = num_queries."""
    return x_SBND.unflatten(2, (-1, num_queries)).permute(1, 2, 3, 0, 4)


def _blocks(x: Tensor, window_size: int) -> Sequence[tuple[slice, slice]]:
    """Return the blocks of queries, each with the keys to which some of its queries attend. Shapes: x [S, ...].

    On meta, where only memory is planned, only the last three blocks are returned: the ones that need most memory, and
    the one before them, whose results are still in memory when the next block begins.
    """
    blocks = []
    for start in range(0, len(x), _BLOCK):
        stop = min(start + _BLOCK, len(x))
        blocks.append((slice(start, stop), slice(max(0, start - window_size + 1) if window_size else 0, stop)))
    return blocks[-3:] if x.is_meta else blocks


def _weights(
    q_BGRQD: Tensor, k_BG1KD: Tensor, scores: CappedScores, queries: slice, keys: slice
) -> tuple[Tensor, Tensor]:
    """Return (softmax of the capped scores, tanh of scores / cap), in fp32 or wider. Shapes: both [B, G, R, Q, K]."""
    product = (q_BGRQD @ k_BG1KD.transpose(-1, -2)).to(accumulate_dtype(q_BGRQD.dtype))
    tanh = product.mul_(scores.scale / scores.cap).tanh_()
    position = torch.arange(queries.stop, device=q_BGRQD.device)
    query, key = position[queries, None], position[None, keys]
    allowed = query >= key
    if scores.window_size:
        allowed &= query < key + scores.window_size
    if scores.documents is not None:
        number_BS = scores.documents.number_SB.t()
        allowed = allowed & (number_BS[:, queries, None] == number_BS[:, None, keys])
        allowed = allowed[:, None, None]
    return (tanh * scores.cap).masked_fill_(allowed.logical_not_(), float("-inf")).softmax(-1), tanh
