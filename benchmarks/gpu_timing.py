"""Time work on a GPU: medians of replays, each after the caches were filled with other data."""

from __future__ import annotations

import statistics
import time
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


def seconds_on_cpu(work: Work, repeats: int = 3) -> float:
    """Return the median seconds of `work` on the CPU, for a rehearsal."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _other_memory() -> Tensor:
    """Return a tensor that replaces the work's own tensors in the caches when it is read."""
    return torch.zeros(_CACHE_BYTES // 4, dtype=torch.float32, device="cuda")
