"""Which of a rank's groups go first on a GPU, where each group's communication has a stream of its own.

What the next kernel waits for is urgent: gathers of tensor parallelism, messages between stages. Gradients and
parameters, which travel between replicas, are due later and large: they yield, else a message would wait for a whole
bucket.
Streams have priorities instead of an order of launches, so CUDA_DEVICE_MAX_CONNECTIONS may
have any value.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import distributed as dist

from megatrain.contracts.layout import REPLICAS


def is_urgent(name: str) -> bool:
    """Whether the group of this name goes first."""
    return name not in REPLICAS


def nccl_options(name: str, timeout: timedelta) -> Any:
    """Return NCCL's options for the group of this name."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=is_urgent(name))
    options._timeout = timeout
    return options
