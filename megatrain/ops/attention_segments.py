"""The segments in which attention with windows or documents is computed on the CPU (segment_attention.py).

A segment is a range of queries with the range of keys to which they attend: a document; several short documents in a
row; or queries of one document with the keys that a window allows.
Shapes: S sequence, Q and K the queries and keys of a segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import torch
from torch import Tensor

from megatrain.ops.documents import PackedDocuments

_SHORT = 128
"""Successive documents of at most this many tokens in total are one segment: a call costs as much as 128 tokens."""


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
