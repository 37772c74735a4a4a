"""Causal attention on the CPU with windows or documents: one call of torch's kernel per segment.

A segment is a range of queries with the range of keys to which they attend: a document; several short documents in a
row; or queries of one document with the keys that a window allows. Memory grows with S, not with S * S. So does the
work, if documents or windows keep their size.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.ops.documents import PackedDocuments
from megatrain.ops.precision import accumulate_dtype

_SHORT = 128
"""Successive documents of at most this many tokens in total are one segment: a call takes as long as 128 tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSegment:
    """Queries and the keys to which some of them attend, in some samples of a micro-batch.

    mask: the number to add to each score, 0 or -inf [Q, K]; None if queries and keys are the same tokens, with a plain
    causal mask.
    """

    samples: slice
    queries: slice
    keys: slice
    mask: Tensor | None = None


def segments_of(
    seq_len: int, window_size: int, documents: PackedDocuments | None, dtype: torch.dtype, device: torch.device
) -> tuple[AttentionSegment, ...]:
    """Return the segments of a micro-batch. Every query of every sample is in exactly one.

    window_size w > 0: a query attends to its own token and the w - 1 tokens before it. documents: a query attends only
    to its own document.
    dtype, device: of the masks. On meta, where only memory is planned, consecutive segments with equal numbers of
    queries and keys are reduced to two: one is computed while the results of the one before it are still in memory.
    """
    masks = _WindowMasks(window_size, dtype, device)
    if documents is None:
        of_document = _segments_of_document(slice(None), 0, seq_len, window_size, masks)
        return tuple(_two_of_each_size(of_document) if device.type == "meta" else of_document)
    return tuple(
        segment
        for sample, starts in enumerate(documents.starts)
        for segment in _segments_of_sample(slice(sample, sample + 1), starts.tolist(), window_size, masks)
    )


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


class _WindowMasks:
    """The masks of windows inside a document. They depend only on the numbers of queries and keys."""

    def __init__(self, window_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.window_size = window_size
        self.dtype = dtype
        self.device = device
        self._found: dict[tuple[int, int], Tensor] = {}

    def mask(self, num_queries: int, num_keys: int) -> Tensor:
        """Return the mask [Q, K] for queries at the last Q of K key positions."""
        sizes = num_queries, num_keys
        if sizes not in self._found:
            query = torch.arange(num_keys - num_queries, num_keys)[:, None]
            key = torch.arange(num_keys)[None]
            self._found[sizes] = self.from_allowed((query >= key) & (query < key + self.window_size))
        return self._found[sizes]

    def from_allowed(self, allowed: Tensor) -> Tensor:
        """Return the mask with 0 where `allowed`, and -inf elsewhere. Shapes: both [Q, K]."""
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~allowed.to(self.device), float("-inf"))


def _segments_of_sample(
    samples: slice, starts: Sequence[int], window_size: int, masks: _WindowMasks
) -> Iterator[AttentionSegment]:
    """Yield the segments of a sample. Its documents begin at `starts`, which ends with the end of the sample."""
    first = 0
    while first < len(starts) - 1:
        last = first + 1
        while last < len(starts) - 1 and starts[last + 1] - starts[first] <= _SHORT:
            last += 1
        if last == first + 1:
            yield from _segments_of_document(samples, starts[first], starts[last], window_size, masks)
        else:
            tokens = slice(starts[first], starts[last])
            yield AttentionSegment(samples, tokens, tokens, _short_documents_mask(starts[first : last + 1], masks))
        first = last


def _two_of_each_size(segments: Iterable[AttentionSegment]) -> Iterator[AttentionSegment]:
    for _, equal in groupby(segments, lambda one: (_length(one.queries), _length(one.keys))):
        yield from islice(equal, 2)


def _length(tokens: slice) -> int:
    return int(tokens.stop - tokens.start)


def _segments_of_document(
    samples: slice, start: int, stop: int, window_size: int, masks: _WindowMasks
) -> Iterator[AttentionSegment]:
    if not 0 < window_size < stop - start:
        yield AttentionSegment(samples, slice(start, stop), slice(start, stop))
        return
    # each key is in up to 5 segments: with more segments, fewer scores would be masked, but there would be more calls
    num_queries = max(_SHORT, window_size // 4)
    for at in range(start, stop, num_queries):
        queries = slice(at, min(at + num_queries, stop))
        keys = slice(max(start, at - window_size + 1), queries.stop)
        yield AttentionSegment(samples, queries, keys, masks.mask(queries.stop - queries.start, keys.stop - keys.start))


def _short_documents_mask(starts: Sequence[int], masks: _WindowMasks) -> Tensor:
    lengths = torch.tensor(starts).diff()
    number = torch.arange(len(lengths)).repeat_interleave(lengths)
    place = torch.arange(len(number))
    allowed = (number[:, None] == number) & (place[:, None] >= place)
    if masks.window_size:
        allowed &= place[:, None] < place + masks.window_size
    return masks.from_allowed(allowed)
