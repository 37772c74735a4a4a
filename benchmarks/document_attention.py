"""Attention over packed documents and over windows on the CPU, beside torch's attention of separate documents.

Forward and backward of 8 query heads and 2 key-value heads of width 64, in fp32. The sides take turns, in the opposite
order in every second round. On the side "separate" each document is a separate tensor from the start, so nothing is
copied.
Run alone on the machine: python -m benchmarks document_attention [--write]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.bars import Bar, at_least, at_most
from benchmarks.result import Result
from megatrain.ops.attention import AttentionPattern, softmax_attention
from megatrain.ops.documents import PackedDocuments, pack_documents
from megatrain.planning.peak_tensor_bytes import PeakTensorBytes

Inputs = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values [S, 1, heads, WIDTH]."""
ROUNDS = 5
SEED = 5
HEADS, KEY_VALUE_HEADS, WIDTH = 8, 2, 64
SPEED_BAR, MEMORY_BAR = 0.9, 1.05
"""Least speed of 32K packed tokens / that of separate documents; most memory of 32K / twice that of 16K."""


def run() -> Result:
    """Measure samples of 8K and 32K tokens with equal and unequal documents, windows, and a mask of all pairs at 8K."""
    torch.manual_seed(SEED)
    rows = [
        _row("16 documents of 512", [512] * 16, with_all_pairs=True),
        _row("16 documents of 2,048", [2048] * 16),
        _row("documents of 20 to 4,096", _unequal(32_768)),
        _row("documents of 20 to 80", _unequal(32_768, 20, 80)),
    ]
    windows = [_window_row(16_384), _window_row(32_768)]
    return Result(
        name="document-attention",
        title="Attention over documents and windows on the CPU",
        command="python -m benchmarks document_attention --write",
        rows=[*rows, *windows],
        notes=[
            f"medians of {ROUNDS} after one that is not counted; {torch.get_num_threads()} threads",
            "speed: seconds of separate documents / of packed ones",
            "all pairs s: torch's attention with a mask of the sequence by the sequence",
            "peak MiB: of all tensors that forward and backward make, without the inputs",
        ],
        bars=_bars(rows, windows),
    )


def _bars(rows: Sequence[dict[str, Any]], windows: Sequence[dict[str, Any]]) -> list[Bar]:
    half, whole = (row["peak MiB"] for row in windows)
    return [
        *(at_least(f"speed, 32,768 tokens, {row['case']}", row["speed"], SPEED_BAR) for row in rows[1:3]),
        at_most("peak of a window, 32,768 tokens / twice that of 16,384", whole / (2 * half), MEMORY_BAR),
    ]


def _unequal(seq_len: int, least: int = 20, most: int = 4096) -> list[int]:
    """Return lengths whose logarithms are uniform, which add up to seq_len."""
    lengths: list[int] = []
    while seq_len:
        drawn = int(least * (most / least) ** torch.rand(()).item())
        lengths.append(min(drawn, seq_len))
        seq_len -= lengths[-1]
    return lengths


def _row(case: str, lengths: Sequence[int], *, with_all_pairs: bool = False) -> dict[str, Any]:
    seq_len = sum(lengths)
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    documents = pack_documents(number[:, None])
    inputs = _inputs(seq_len)
    separate = [_inputs(length) for length in lengths]
    sides: dict[str, Callable[[], None]] = {
        "packed": lambda: _packed(inputs, seq_len, 0, documents),
        "separate": lambda: _separate(separate),
    }
    if with_all_pairs:
        sides["all pairs"] = lambda: _dense(inputs, AttentionPattern(seq_len, 0, documents))
    seconds = _measure(sides)
    return {
        "case": case,
        "tokens": seq_len,
        "packed s": seconds["packed"],
        "separate s": seconds["separate"],
        "speed": seconds["separate"] / seconds["packed"],
        "all pairs s": seconds.get("all pairs"),
        "peak MiB": _peak_mib(sides["packed"]),
    }


def _window_row(seq_len: int) -> dict[str, Any]:
    inputs = _inputs(seq_len)
    sides: dict[str, Callable[[], None]] = {"packed": lambda: _packed(inputs, seq_len, 1024, None)}
    return {
        "case": "window of 1,024",
        "tokens": seq_len,
        "packed s": _measure(sides)["packed"],
        "separate s": None,
        "speed": None,
        "all pairs s": None,
        "peak MiB": _peak_mib(sides["packed"]),
    }


def _inputs(seq_len: int) -> Inputs:
    q, k, v = (
        torch.randn(seq_len, 1, count, WIDTH).requires_grad_() for count in (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)
    )
    return q, k, v


def _packed(inputs: Inputs, seq_len: int, window_size: int, documents: PackedDocuments | None) -> None:
    pattern = AttentionPattern(seq_len, window_size, documents)
    q, k, v = inputs
    out = softmax_attention(q, k, v, pattern)
    torch.autograd.grad(out, inputs, torch.ones_like(out))


def _separate(documents: Sequence[Inputs]) -> None:
    for inputs in documents:
        _dense(inputs)


def _dense(inputs: Inputs, pattern: AttentionPattern | None = None) -> None:
    q, k, v = (x.permute(1, 2, 0, 3) for x in inputs)
    mask = None if pattern is None else pattern.mask(q.device, q.dtype)
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    torch.autograd.grad(out, inputs, torch.ones_like(out))


def _measure(sides: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Return the median seconds of each side."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(ROUNDS + 1):
        for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            began = time.perf_counter()
            sides[name]()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in seconds.items()}


def _peak_mib(side: Callable[[], None]) -> float:
    with PeakTensorBytes() as memory:
        side()
    return memory.peak_bytes / 2**20
