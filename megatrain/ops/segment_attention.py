"""Causal attention on the CPU with windows or documents: one call of torch's kernel per segment.

A segment is a range of queries with the range of keys to which they attend (attention_segments.py). Memory grows with
S, not with S * S. So does the work, if documents or windows keep their size.

Tokens of other documents, and tokens before the window, must not affect a result, even if their keys or values are NaN
or infinite. The kernel adds -inf to the score of a masked key and multiplies its value by 0; with NaN, both results are
NaN. So if keys or values are not finite, segments with a mask are computed without them, and the results that depend on
them are set to NaN. Later tokens of the same document are not treated so: if their values are not finite, the kernel
may return NaN for a query before them.
Shapes: S sequence, B micro-batch, N query heads, G key-value heads, D head dim, Q and K the queries and keys of a
segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.ops.attention_segments import AttentionSegment
from megatrain.ops.precision import accumulate_dtype


def segment_attention(
    q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, segments: Sequence[AttentionSegment], scale: float | None
) -> Tensor:
    """Return softmax(scale * q k' + mask) v of each segment.

    Saves q, k, v, the result and [B, N, S] logarithms for backward.
    Shapes: q [S, B, N, D]; k and v [S, B, G, D], N a multiple of G; result [S, B, N, D].
    """
    return _SegmentAttention.apply(q_SBND, k_SBGD, v_SBGD, segments, scale)


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_SBND: Tensor,
        k_SBGD: Tensor,
        v_SBGD: Tensor,
        segments: Sequence[AttentionSegment],
        scale: float | None,
    ) -> Tensor:
        out_SBND = torch.empty(q_SBND.shape, dtype=q_SBND.dtype, device=q_SBND.device)
        q, k, v, out = (x.permute(1, 2, 0, 3) for x in (q_SBND, k_SBGD, v_SBGD, out_SBND))
        logsumexp_BNS = torch.empty(q.shape[:3], dtype=accumulate_dtype(q.dtype), device=q.device)
        attend = _attend_finite if _has_masks(segments) and not _is_finite(k_SBGD, v_SBGD) else _attend
        for segment in segments:
            of_queries, of_keys = (
                (segment.samples, slice(None), segment.queries),
                (segment.samples, slice(None), segment.keys),
            )
            out[of_queries], logsumexp_BNS[of_queries] = attend(
                _Tokens(q[of_queries], k[of_keys], v[of_keys]), segment.mask, scale
            )
        ctx.segments, ctx.scale = segments, scale
        ctx.save_for_backward(q_SBND, k_SBGD, v_SBGD, out_SBND, logsumexp_BNS)
        return out_SBND

    @staticmethod
    def backward(ctx: Any, grad_SBND: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        *of_tokens, logsumexp_BNS = ctx.saved_tensors
        _, k_SBGD, v_SBGD, _ = of_tokens
        grads_SBND = _gradients(ctx.segments, of_tokens, logsumexp_BNS, grad_SBND, ctx.scale, _differentiate)
        if _has_masks(ctx.segments) and not _is_finite(*grads_SBND[1:]):
            grads_SBND = _gradients(ctx.segments, of_tokens, logsumexp_BNS, grad_SBND, ctx.scale, _differentiate_finite)
        grad_q_SBND, grad_k_SBGD, grad_v_SBGD = grads_SBND
        return grad_q_SBND, grad_k_SBGD.to(k_SBGD.dtype), grad_v_SBGD.to(v_SBGD.dtype), None, None


class _Tokens(NamedTuple):
    """The queries, keys and values of a segment, or their gradients. Shapes: [B, N, Q, D], [B, G, K, D] (two)."""

    q: Tensor
    k: Tensor
    v: Tensor


class _Results(NamedTuple):
    """The results of a segment. Shapes: [B, N, Q, D], [B, N, Q]."""

    out: Tensor
    logsumexp: Tensor


def _attend(tokens: _Tokens, mask: Tensor | None, scale: float | None) -> _Results:
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *tokens, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return _Results(*found)


def _attend_finite(tokens: _Tokens, mask: Tensor | None, scale: float | None) -> _Results:
    """Return the results of a segment; NaN for a query that attends to a key or value that is not finite."""
    if mask is None:
        return _attend(tokens, mask, scale)
    is_bad_key_BGK = _has_nonfinite(tokens.k, tokens.v)
    attends_to_bad_BGQ = (is_bad_key_BGK[..., None, :] & (mask == 0)).any(-1)
    attends_to_bad_BNQ = attends_to_bad_BGQ.repeat_interleave(tokens.q.shape[1] // tokens.k.shape[1], dim=1)
    k, v = (_replaced(x, is_bad_key_BGK, 0.0) for x in (tokens.k, tokens.v))
    found = _attend(_Tokens(tokens.q, k, v), mask, scale)
    return _Results(*(_replaced(x, attends_to_bad_BNQ, math.nan) for x in found))


_Differentiate = Callable[[Tensor, _Tokens, _Results, "Tensor | None", "float | None"], _Tokens]


def _differentiate(
    grad: Tensor, tokens: _Tokens, results: _Results, mask: Tensor | None, scale: float | None
) -> _Tokens:
    """Return the gradients of a segment for the gradient of its result."""
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *tokens, *results, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return _Tokens(*found)


def _differentiate_finite(
    grad: Tensor, tokens: _Tokens, results: _Results, mask: Tensor | None, scale: float | None
) -> _Tokens:
    """Return the gradients of a segment. They are NaN for a query that has a number that is not finite, and for all
    keys to which it attends, but not for other tokens."""
    if mask is None:
        return _differentiate(grad, tokens, results, mask, scale)
    is_bad_key_BGK = _has_nonfinite(tokens.k, tokens.v)
    is_bad_BNQ = _has_nonfinite(tokens.q, grad, results.out) | ~results.logsumexp.isfinite()
    is_bad_BGQ = is_bad_BNQ.unflatten(1, (tokens.k.shape[1], -1)).any(2)
    is_attended_BGK = (is_bad_BGQ[..., None] & (mask == 0)).any(-2)
    q, out, grad, logsumexp = (_replaced(x, is_bad_BNQ, 0.0) for x in (tokens.q, results.out, grad, results.logsumexp))
    k, v = (_replaced(x, is_bad_key_BGK, 0.0) for x in (tokens.k, tokens.v))
    found = _differentiate(grad, _Tokens(q, k, v), _Results(out, logsumexp), mask, scale)
    return _Tokens(
        _replaced(found.q, is_bad_BNQ, math.nan), *(_replaced(x, is_attended_BGK, math.nan) for x in (found.k, found.v))
    )


def _gradients(
    segments: Sequence[AttentionSegment],
    saved_SBND: Sequence[Tensor],
    logsumexp_BNS: Tensor,
    grad_SBND: Tensor,
    scale: float | None,
    differentiate: _Differentiate,
) -> _Tokens:
    """Return the sums of the gradients of all segments [S, B, N or G, D]. saved: q, k, v and the result."""
    q_SBND, k_SBGD, v_SBGD, _ = saved_SBND
    # gradients of keys in several segments are sums, kept in the wide dtype until the last segment
    is_sum = any(one.keys != one.queries for one in segments)
    of_keys_dtype = accumulate_dtype(k_SBGD.dtype) if is_sum else k_SBGD.dtype
    sums_SBND = _Tokens(
        torch.zeros(q_SBND.shape, dtype=q_SBND.dtype, device=q_SBND.device),
        *(torch.zeros(x.shape, dtype=of_keys_dtype, device=x.device) for x in (k_SBGD, v_SBGD)),
    )
    q, k, v, out, grad, *sums = (x.permute(1, 2, 0, 3) for x in (*saved_SBND, grad_SBND, *sums_SBND))
    for one in segments:
        of_queries, of_keys = (one.samples, slice(None), one.queries), (one.samples, slice(None), one.keys)
        found = differentiate(
            grad[of_queries],
            _Tokens(q[of_queries], k[of_keys], v[of_keys]),
            _Results(out[of_queries], logsumexp_BNS[of_queries]),
            one.mask,
            scale,
        )
        for whole, part, place in zip(sums, found, (of_queries, of_keys, of_keys), strict=True):
            whole[place] += part
    return sums_SBND


def _has_masks(segments: Sequence[AttentionSegment]) -> bool:
    return any(one.mask is not None for one in segments)


def _is_finite(*tensors: Tensor) -> bool:
    """Return whether all numbers are finite; True on meta. aminmax propagates NaN and reads each tensor once."""
    return all(x.is_meta or bool(torch.stack(torch.aminmax(x)).isfinite().all()) for x in tensors)


def _has_nonfinite(*tensors: Tensor) -> Tensor:
    """Return for each token and head whether one of its numbers is not finite. Shapes: [..., D]; result [...]."""
    return torch.stack([x.isfinite().all(-1).logical_not_() for x in tensors]).any(0)


def _replaced(x: Tensor, where: Tensor, value: float) -> Tensor:
    """Return `x` with `value` for the tokens and heads `where`. Shapes: x [...] or [..., D]; where [...]."""
    return x.masked_fill(where if x.dim() == where.dim() else where[..., None], value)
