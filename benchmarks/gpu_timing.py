"""How long work takes on a GPU: medians of replays, each after the caches were filled with something else."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

Work = Callable[[], object]
_CACHE_BYTES = 256 << 20
"""Read between replays: more than any L2 cache holds."""


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
    # thread_local: what the threads of torch.compile do meanwhile is no part of the recording
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    other = _other_memory()
    seconds = []
    for _ in range(repeats):
        # read, not written: lines that were written would go back to memory during the replay, at its cost
        other.sum()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def _other_memory() -> Tensor:
    """Return what takes the place of a work's own tensors in the caches when it is read."""
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
