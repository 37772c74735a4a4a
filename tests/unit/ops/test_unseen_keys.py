"""Keys that a query must not see change nothing, even if they are NaN or infinite, in forward and in backward."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megatrain.ops.attention import AttentionPattern, softmax_attention
from megatrain.ops.documents import PackedDocuments, pack_documents

SEQ_LEN = 701
LENGTHS: dict[str, list[int]] = {
    "tokens": [1] * SEQ_LEN,
    "short": [40, 40, 1, 1, 1, 7, 38, 127, 1, 61, 67, 128, 1, 2, 2, 184],
    "long": [131, 1, 257, 129, 183],
    "whole": [SEQ_LEN],
}


class Found(NamedTuple):
    """The result and the gradients. Shapes: [S, ...]."""

    out: Tensor
    grad_q: Tensor
    grad_k: Tensor
    grad_v: Tensor


def documents_of(lengths: list[int]) -> PackedDocuments:
    return pack_documents(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[:, None])


def pattern_of(lengths: str, window: int) -> AttentionPattern:
    return AttentionPattern(SEQ_LEN, window, documents_of(LENGTHS[lengths]) if lengths != "whole" else None)


def attend(pattern: AttentionPattern, changed: dict[str, slice | Tensor], value: float, rows: slice) -> Found:
    """Return the results of attention with `value` in some positions of heads (q, k, v) and of the gradient (grad),
    whose other positions are zero outside of `rows`."""
    generator = torch.Generator().manual_seed(1)
    heads = {
        name: torch.randn(SEQ_LEN, 1, number, 8, generator=generator, dtype=torch.float64)
        for name, number in (("q", 4), ("k", 2), ("v", 2))
    }
    inner = torch.randn(SEQ_LEN, 1, 32, generator=generator, dtype=torch.float64)
    grad = torch.zeros_like(inner)
    grad[rows] = inner[rows]
    for name, where in changed.items():
        (heads | {"grad": grad})[name][where] = value
    q, k, v = (one.requires_grad_() for one in heads.values())
    out = softmax_attention(q, k, v, pattern)
    return Found(out.detach(), *torch.autograd.grad(out, (q, k, v), grad))


@functools.cache
def unchanged(lengths: str, window: int, start: int, stop: int) -> Found:
    """Return the results of attention without a changed position; the gradient is zero outside of rows `start` to
    `stop`."""
    return attend(pattern_of(lengths, window), {}, 0.0, slice(start, stop))


def some_of(starts: list[int]) -> list[tuple[int, int]]:
    """Return the bounds of some documents, including the first and the last."""
    bounds = list(itertools.pairwise(starts))
    return [*bounds[:: max(1, len(bounds) // 7)], bounds[-1]]


@pytest.mark.parametrize(
    ("lengths", "names", "value"),
    [
        ("tokens", "kv", math.nan),
        ("tokens", "q grad", math.inf),
        ("tokens", "all", -math.inf),
        ("short", "kv", math.inf),
        ("short", "q grad", -math.inf),
        ("short", "all", math.nan),
        ("long", "kv", -math.inf),
        ("long", "q grad", math.nan),
        ("long", "all", math.inf),
    ],
)
def test_other_documents_change_nothing_whatever_they_hold(lengths: str, names: str, value: float) -> None:
    pattern = pattern_of(lengths, 0)
    for start, stop in some_of(documents_of(LENGTHS[lengths]).starts[0].tolist()):
        own = slice(start, stop)
        others = torch.ones(SEQ_LEN, dtype=torch.bool)
        others[own] = False
        where = {"kv": ("k", "v"), "q grad": ("q", "grad"), "all": ("q", "k", "v", "grad")}[names]
        found = attend(pattern, dict.fromkeys(where, others), value, own)
        for one, expected in zip(found, unchanged(lengths, 0, start, stop), strict=True):
            assert torch.equal(one[own], expected[own]), (start, stop)


@pytest.mark.parametrize(
    ("lengths", "window", "name", "value"),
    [
        ("whole", 5, "k", math.nan),
        ("whole", 5, "v", math.inf),
        ("whole", 300, "k", math.inf),
        ("whole", 300, "v", math.nan),
        ("short", 3, "k", math.nan),
        ("short", 3, "v", math.inf),
        ("long", 40, "k", math.inf),
        ("long", 40, "v", math.nan),
    ],
)
def test_keys_before_the_window_change_nothing(lengths: str, window: int, name: str, value: float) -> None:
    pattern = pattern_of(lengths, window)
    starts = documents_of(LENGTHS[lengths]).starts[0].tolist()
    for query in (0, 1, 40, 128, 129, 389, SEQ_LEN - 1):
        start = max(one for one in starts if one <= query)
        seen, row = slice(max(start, query + 1 - window), query + 1), slice(query, query + 1)
        unseen = torch.arange(SEQ_LEN) < seen.start
        found, expected = attend(pattern, {name: unseen}, value, row), unchanged(lengths, window, query, query + 1)
        assert torch.equal(found.out[row], expected.out[row]), query
        assert torch.equal(found.grad_q[row], expected.grad_q[row]), query
        # NaN is in the results of other rows of the document, and their gradients reach the keys that they share.
        if seen.start == start:
            assert torch.equal(found.grad_k[seen], expected.grad_k[seen]), query
            assert torch.equal(found.grad_v[seen], expected.grad_v[seen]), query


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize(("lengths", "window"), [("short", 0), ("whole", 5), ("short", 3)])
def test_queries_are_nan_only_if_they_see_a_nan(lengths: str, window: int, name: str) -> None:
    documents = documents_of(LENGTHS[lengths])
    pattern = AttentionPattern(SEQ_LEN, window, documents)
    number_S = documents.number_SB[:, 0]
    query, key = torch.arange(SEQ_LEN)[:, None], torch.arange(SEQ_LEN)[None]
    sees_SS = (number_S[:, None] == number_S) & (query >= key) & (query < key + (window or SEQ_LEN))
    for bad in (3, 100, 130, 199):
        found = attend(pattern, {name: slice(bad, bad + 1)}, math.nan, slice(None))
        rows_S = sees_SS[:, bad]
        keys_S = sees_SS[rows_S].any(0)
        for one, expected in zip(found, (rows_S, rows_S, keys_S, keys_S), strict=True):
            assert torch.equal(one.isnan().flatten(1).any(1), expected), bad
