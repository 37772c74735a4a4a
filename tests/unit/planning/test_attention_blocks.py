"""Attention in blocks, planned on meta with only some of the blocks, needs the memory of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatrain.ops.attention_segments import segments_of
from megatrain.ops.capped_attention import CappedScores, capped_attention
from megatrain.ops.segment_attention import segment_attention
from megatrain.planning.peak_tensor_bytes import PeakTensorBytes

HEADS, KEY_HEADS, DIM = 4, 2, 8
Attention = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def capped(q: Tensor, k: Tensor, v: Tensor, window_size: int) -> Tensor:
    return capped_attention(q, k, v, CappedScores(0.3, 5.0, window_size, None))


def in_segments(q: Tensor, k: Tensor, v: Tensor, window_size: int) -> Tensor:
    return segment_attention(q, k, v, segments_of(len(q), window_size, None, q.dtype, q.device), None)


def peaks(attention: Attention, seq_len: int, window_size: int, device: str) -> tuple[int, int]:
    """Return the peaks of live bytes in forward and in backward."""
    q = torch.zeros(seq_len, 1, HEADS, DIM, dtype=torch.bfloat16, device=device, requires_grad=True)
    k, v = (torch.zeros(seq_len, 1, KEY_HEADS, DIM, dtype=q.dtype, device=device, requires_grad=True) for _ in "kv")
    with PeakTensorBytes(on_meta=device == "meta") as memory:
        out = attention(q, k, v, window_size)
        forward = memory.peak_bytes
        memory.reset_peak()
        out.backward(torch.zeros_like(out))
        return forward, memory.peak_bytes


@pytest.mark.parametrize(
    ("attention", "window_size", "seq_len"),
    [
        ([capped, in_segments][number % 2], window_size, seq_len)
        for number, (window_size, seq_len) in enumerate(itertools.product([0, 40, 300], [200, 256, 300, 556, 1300]))
    ],
)
def test_planned_blocks_need_the_memory_of_all(attention: Attention, window_size: int, seq_len: int) -> None:
    assert peaks(attention, seq_len, window_size, "meta") == peaks(attention, seq_len, window_size, "cpu")
