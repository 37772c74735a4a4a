"""Times an all-reduce among a few ranks, without the wait for their arrival. Loads torch, so probes import it late.

A collective takes as long as its slowest member, so both partners of a pair measure the same time. Two other times show
which partner is slow: the wait until both have connected, and the time of each host's own computation before that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

REPETITIONS = 7
CPU_BYTES = 4 << 20
GPU_BYTES = 64 << 20


def measure_all_reduce(
    device_type: str, index: int, rank: int, world_size: int, make_store: Callable[[], Any], timeout_s: float
) -> dict[str, float]:
    """Return wait_s, the time until all ranks were connected and had completed a first all-reduce, and reduce_s, the
    time of the fastest of REPETITIONS further ones.

    device_type: "cuda", or anything else for the CPU. index: the GPU of this rank.

    Communication: gloo or NCCL, among all ranks of `make_store`'s store; blocks up to the timeout.
    Raises: RuntimeError when ranks do not connect, a rank is lost, or a sum is wrong.
    """
    import torch
    from torch import distributed as dist

    device = torch.device(device_type, index) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    began = time.perf_counter()
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=make_store(),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device_type == "cuda" else None,
    )
    values = torch.empty((GPU_BYTES if device_type == "cuda" else CPU_BYTES) // 4, device=device)
    _all_reduce(values, rank, world_size)
    wait_s = time.perf_counter() - began
    reduce_s = min(_all_reduce(values, rank, world_size) for _ in range(REPETITIONS))
    dist.destroy_process_group()  # not after an error: it could wait for a lost peer, and the process exits anyway
    return {"wait_s": wait_s, "reduce_s": reduce_s}


def _all_reduce(values: Any, rank: int, world_size: int) -> float:
    """Run an all-reduce and return its seconds. Raises: RuntimeError when the sum is wrong."""
    import torch
    from torch import distributed as dist

    values.fill_(rank + 1)
    dist.barrier()  # so that no rank's fill_ is part of another rank's time
    if values.is_cuda:
        torch.cuda.synchronize(values.device)
    began = time.perf_counter()
    dist.all_reduce(values)
    if values.is_cuda:
        torch.cuda.synchronize(values.device)
    taken_s = time.perf_counter() - began
    expected = world_size * (world_size + 1) // 2  # small integers: exact in any order
    if not bool((values == expected).all()):
        raise RuntimeError(f"rank {rank}: an all-reduce of {world_size} ranks returned a wrong sum")
    return taken_s
