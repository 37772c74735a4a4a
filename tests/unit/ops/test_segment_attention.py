"""Attention by segments compared with a softmax over all pairs, for documents and windows of many sizes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatrain.ops.attention import AttentionPattern, softmax_attention
from megatrain.ops.attention_choice import kind_of
from megatrain.ops.attention_segments import segments_of
from megatrain.ops.documents import PackedDocuments, pack_documents
from tests.helpers.relative_error import assert_no_worse_than_eager, assert_same

LENGTHS: dict[str, list[list[int]]] = {
    "one": [[701]],
    "long-and-short": [[300, 1, 1, 7, 131, 128, 129, 4], [1] * 701, [127, 1, 128, 200, 245]],
    "equal": [[64] * 10 + [61], [701], [128] * 5 + [61]],
}
WINDOWS = {
    "one": [5, 128, 700, 701, 4000],
    "long-and-short": [0, 2, 128, 300, 4000],
    "equal": [0, 5, 701],
}
CASES = [(lengths, window) for lengths, windows in WINDOWS.items() for window in windows]


def packed(lengths: list[list[int]]) -> PackedDocuments:
    columns = [torch.arange(len(length)).repeat_interleave(torch.tensor(length)) for length in lengths]
    return pack_documents(torch.stack(columns, 1))


def heads(num_samples: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(701, num_samples, n, 8, generator=generator, dtype=torch.float64).to(dtype) for n in (4, 2, 2)]


def by_all_pairs(q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern) -> Tensor:
    mask = AttentionPattern(pattern.seq_len, pattern.window_size, pattern.documents).mask(q.device, q.dtype)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)


@pytest.mark.slow(kept=["one-128", "one-4000", "equal-0", "equal-5"])
@pytest.mark.parametrize(("lengths", "window"), CASES)
def test_segments_give_the_softmax_over_all_pairs(lengths: str, window: int) -> None:
    documents = packed(LENGTHS[lengths]) if lengths != "one" else None
    pattern = AttentionPattern(701, window, documents)
    inputs = heads(len(LENGTHS[lengths]), torch.float64)
    assert_same(
        lambda q, k, v: softmax_attention(q, k, v, pattern),
        lambda q, k, v: by_all_pairs(q, k, v, pattern),
        inputs,
        torch.ones(701, inputs[0].shape[1], 32, dtype=torch.float64).cumsum(0) / 701,
        1e-12,
    )


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 40])
def test_sums_over_segments_in_bf16_are_no_worse_than_eager(window: int) -> None:
    pattern = AttentionPattern(701, window, packed(LENGTHS["long-and-short"]))
    inputs = heads(3, torch.bfloat16)
    assert_no_worse_than_eager(
        lambda q, k, v: softmax_attention(q, k, v, pattern),
        lambda q, k, v: by_all_pairs(q, k, v, pattern),
        inputs,
        torch.ones(701, 3, 32, dtype=torch.bfloat16),
    )


@pytest.mark.parametrize("lengths", LENGTHS)
def test_each_query_is_in_one_segment_and_scores_grow_linearly(lengths: str) -> None:
    documents = packed(LENGTHS[lengths])
    for window in WINDOWS[lengths]:
        num_segments = torch.zeros(701, len(LENGTHS[lengths]), dtype=torch.int64)
        num_scores = 0
        for segment in segments_of(701, window, documents, torch.float32, torch.device("cpu")):
            num_segments[segment.queries, segment.samples] += 1
            num_queries, num_keys = (tokens.stop - tokens.start for tokens in (segment.queries, segment.keys))
            assert segment.mask is None or segment.mask.shape == (num_queries, num_keys), window
            num_scores += num_queries * num_keys
        assert (num_segments == 1).all(), window
        longest_row = [max(128, min(length, window + max(128, window // 4)) if window else length)
                       for sample in LENGTHS[lengths] for length in sample for _ in range(length)]  # fmt: skip
        assert num_scores <= sum(longest_row), window


def test_a_plan_on_meta_saves_what_a_step_on_the_cpu_saves() -> None:
    def saved_bytes(device: str) -> int:
        pattern = AttentionPattern(701, 40, packed(LENGTHS["one"]), device_kind=kind_of(torch.device("cpu")))
        q, k, v = (x.to(device).requires_grad_() for x in heads(1, torch.float32))
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: found.append(x.nbytes) or x, lambda x: x):
            softmax_attention(q, k, v, pattern).sum().backward()
        return sum(found)

    assert saved_bytes("meta") == saved_bytes("cpu")
