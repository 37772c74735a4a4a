"""How long work takes on a GPU: medians of replays, each after the caches were overwritten."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

Work = Callable[[], object]
_CACHE_BYTES = 256 << 20
"""Written between replays: more than any L2 cache holds."""


def seconds_of(work: Work, repeats: int = 20) -> float:
    """Return the median seconds of `work`, recorded once as a CUDA graph and replayed.

    A graph keeps the host out of the figure: what is timed is the GPU's work alone, for us and for the peers alike.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    cache = torch.empty(_CACHE_BYTES, dtype=torch.int8, device="cuda")
    seconds = []
    for _ in range(repeats):
        cache.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


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
