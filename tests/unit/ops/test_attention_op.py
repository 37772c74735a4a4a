"""Attention compared with an explicit softmax, for every mask and head arrangement."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from megatrain.ops.attention import AttentionPattern, softmax_attention
from megatrain.ops.documents import PackedDocuments, pack_documents
from tests.helpers.kernels import UNDER_TEST, draw, on_device
from tests.helpers.relative_error import assert_no_worse_than_eager, assert_same

S, B, D = 10, 3, 8
DOCUMENTS = torch.tensor(
    [[0, 0, 0, 1, 1, 1, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5, 2, 3, 3, 3], [1, 1, 2, 2, 1, 1, 2, 4, 4, 5]]
).t()


def documents(document_SB: Tensor | None) -> PackedDocuments | None:
    return None if document_SB is None else pack_documents(document_SB).copied(on_device)


def may_see(query: int, key: int, window: int, documents: list[int] | None) -> bool:
    if key > query or (window > 0 and query - key >= window):
        return False
    return documents is None or len(set(documents[key : query + 1])) == 1


def plain_attention(q: Tensor, k: Tensor, v: Tensor, allowed: list[list[list[bool]]]) -> Tensor:
    """Softmax over the allowed keys, head by head. `allowed` is [B][S][S]."""
    heads_a_group = q.shape[2] // k.shape[2]
    mask_BSS = on_device(torch.tensor(allowed))
    outs = []
    for head in range(q.shape[2]):
        group = head // heads_a_group
        score_BSS = torch.einsum("sbd,tbd->bst", q[:, :, head], k[:, :, group]) / math.sqrt(q.shape[3])
        weight_BSS = score_BSS.masked_fill(~mask_BSS, -math.inf).softmax(-1)
        outs.append(torch.einsum("bst,tbd->sbd", weight_BSS, v[:, :, group]))
    return torch.cat(outs, -1)


def allowed_pairs(window: int, document_SB: Tensor | None) -> list[list[list[bool]]]:
    columns = [None] * B if document_SB is None else document_SB.t().tolist()
    return [[[may_see(query, key, window, column) for key in range(S)] for query in range(S)] for column in columns]


@pytest.mark.parametrize("has_documents", [False, True])
def test_mask_is_the_rule_pair_by_pair(has_documents: bool) -> None:
    document_SB = DOCUMENTS if has_documents else None
    for window in (0, 1, 3, S - 1, S, S + 5):
        pattern = AttentionPattern(S, window, documents(document_SB))
        mask = pattern.mask(UNDER_TEST.device, torch.float32)
        assert pattern.is_plain == (not has_documents and window in (0, S, S + 5)), window
        assert set(mask.unique().tolist()) <= {0.0, -math.inf}, window
        assert (mask.expand(B, 1, S, S)[:, 0] == 0.0).tolist() == allowed_pairs(window, document_SB), window


ARRANGEMENTS = [(4, 4), (4, 2), (4, 1), (6, 3), (1, 1)]


@pytest.mark.slow(kept=["heads0-0-False", "heads7-3-True", "heads10-3-False", "heads13-0-True"])
@pytest.mark.parametrize(
    ("heads", "window", "has_documents"), list(itertools.product(ARRANGEMENTS, [0, 3], [False, True]))
)
def test_attention_is_the_softmax_over_allowed_pairs(heads: tuple[int, int], window: int, has_documents: bool) -> None:
    num_heads, num_groups = heads
    document_SB = DOCUMENTS if has_documents else None
    pattern = AttentionPattern(S, window, documents(document_SB))
    allowed = allowed_pairs(window, document_SB)
    inputs = [draw(S, B, num_heads, D), draw(S, B, num_groups, D, seed=1), draw(S, B, num_groups, D, seed=2)]

    assert_same(
        lambda q, k, v: softmax_attention(q, k, v, pattern),
        lambda q, k, v: plain_attention(q, k, v, allowed),
        inputs,
        draw(S, B, num_heads * D, seed=3),
        1e-12,
    )


def test_attention_in_both_directions_sees_all_pairs() -> None:
    pattern, everything = AttentionPattern(S, is_causal=False), [[[True] * S] * S] * B

    assert_same(
        lambda q, k, v: softmax_attention(q, k, v, pattern),
        lambda q, k, v: plain_attention(q, k, v, everything),
        [draw(S, B, 4, D), draw(S, B, 2, D, seed=1), draw(S, B, 2, D, seed=2)],
        draw(S, B, 4 * D, seed=3),
        1e-12,
    )


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_half_precision_loses_no_more_than_plain_torch(heads: tuple[int, int], has_documents: bool) -> None:
    num_heads, num_groups = heads
    document_SB = DOCUMENTS if has_documents else None
    bf16 = torch.bfloat16
    pattern = AttentionPattern(S, 0, documents(document_SB))
    allowed = allowed_pairs(0, document_SB)
    inputs = [draw(S, B, num_heads, 32, dtype=bf16), draw(S, B, num_groups, 32, dtype=bf16, seed=1),
              draw(S, B, num_groups, 32, dtype=bf16, seed=2)]  # fmt: skip

    assert_no_worse_than_eager(
        lambda q, k, v: softmax_attention(q, k, v, pattern),
        lambda q, k, v: plain_attention(q, k, v, allowed),
        inputs,
        draw(S, B, num_heads * 32, dtype=bf16, seed=3),
    )


def test_heads_may_be_views_of_one_product() -> None:
    allowed = allowed_pairs(0, None)

    def split(product: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = product.unflatten(-1, (2, 4, D))
        return y[..., :-2, :].flatten(2, 3), y[..., -2, :], y[..., -1, :]

    assert not split(draw(S, B, 2 * 4 * D))[1].is_contiguous()
    assert_same(
        lambda product: softmax_attention(*split(product), AttentionPattern(S)),
        lambda product: plain_attention(*split(product), allowed),
        [draw(S, B, 2 * 4 * D)],
        draw(S, B, 4 * D, seed=3),
        1e-12,
    )


def test_later_tokens_change_nothing() -> None:
    q, k, v = draw(S, B, 4, D), draw(S, B, 4, D, seed=1), draw(S, B, 4, D, seed=2)
    before = softmax_attention(q, k, v, AttentionPattern(S))
    for x in (q, k, v):
        x[7:] = 100.0

    torch.testing.assert_close(softmax_attention(q, k, v, AttentionPattern(S))[:7], before[:7])
