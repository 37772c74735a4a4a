"""Time work on a GPU: medians of replays, each after the caches were filled with other data."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

Work = Callable[[], object]
_CACHE_BYTES = 256 << 20
"""Bytes that are read between replays: more than any L2 cache holds."""


def seconds_of(work: Work, repeats: int = 20) -> float:
    """Return the median seconds of `work`, captured once as a CUDA graph and replayed.

    A graph excludes the host: only the GPU's work is timed, for megatrain and for the peers.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: calls of torch.compile's threads during the capture do not invalidate it
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    other = _other_memory()
    seconds = []
    for _ in range(repeats):
        # the memory is read, not written: written cache lines would be written back during the replay and slow it
        other.sum()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def _other_memory() -> Tensor:
    """Return a tensor that replaces the work's own tensors in the caches when it is read."""
    return torch.zeros(_CACHE_BYTES // 4, dtype=torch.float32, device="cuda")


def copy_bandwidth() -> float:
    """Return bytes a second, read and written, of a copy of 1 GiB on the device: the ceiling of memory-bound work."""
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source))


def product_flops() -> float:
    """Return FLOP a second of a product of two bf16 matrices of 8192 x 8192 random numbers."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * 8192**3 / seconds_of(lambda: torch.mm(a, b, out=out))
