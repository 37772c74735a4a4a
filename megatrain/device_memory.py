"""The memory of a worker's device: torch's allocator set up for weeks of steps, and watched.

A step allocates the same tensors as the step before it, so after some steps torch has all the memory it needs and asks
the driver for no more. What can still go wrong is that free memory lies in pieces of the wrong sizes: torch then gives
back what it holds and asks again, while the GPU stands still. Growing segments keep that from happening; a count of
such retries says when it happens all the same.
Source: torch's notes on CUDA memory management (expandable_segments, memory_stats).
"""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

_logger = logging.getLogger(__name__)
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
GROWING_SEGMENTS = "expandable_segments:True"
SETTLED_AFTER_STEPS = 3
_GIB = 1 << 30


class DeviceMemory(Protocol):
    """What the step loop asks of a device's memory."""

    def peak_bytes(self) -> int:
        """Return the most that this process has used."""

    def after_step(self, step: int) -> str:
        """Look at what a step did. Return what is to be said of it, once in a while."""


class HostMemory:
    """The memory of a process without an accelerator."""

    def peak_bytes(self) -> int:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def after_step(self, step: int) -> str:
        return ""


class CudaMemory:
    """The memory of one GPU. Warns in this rank's own log when the allocator had to start over."""

    def __init__(self, total_bytes: int, read_statistics: Callable[[], Mapping[str, Any]]) -> None:
        self._total_bytes = total_bytes
        self._read_statistics = read_statistics
        self._num_steps = 0
        self._num_retries = 0
        self._warn_at = 1

    def peak_bytes(self) -> int:
        return self._read_statistics().get("allocated_bytes.all.peak", 0)

    def after_step(self, step: int) -> str:
        """Return, after the first steps, how full the GPU is."""
        statistics = self._read_statistics()
        self._num_steps += 1
        self._watch_retries(step, statistics.get("num_alloc_retries", 0))
        if self._num_steps != SETTLED_AFTER_STEPS:
            return ""
        tensors, held = (statistics.get(f"{kind}_bytes.all.peak", 0) for kind in ("allocated", "reserved"))
        return (
            f"GPU memory: tensors took {tensors / _GIB:.1f} GiB at most, torch holds {held / _GIB:.1f} of "
            f"{self._total_bytes / _GIB:.1f} GiB"
        )

    def _watch_retries(self, step: int, num_retries: int) -> None:
        """Warn of the first retry, and again each time their number has doubled: a full GPU has them in every step."""
        if num_retries > self._num_retries and num_retries >= self._warn_at:
            _logger.warning(
                "step %d: the GPU's memory was full and torch has given back what it held %d times so far, which stops "
                "the GPU each time; see parallel.recompute, parallel.offload_layers and `megatrain config check "
                "--dry-run`",
                step,
                num_retries,
            )
            self._warn_at = 2 * num_retries
        self._num_retries = num_retries


def device_memory(device: torch.device) -> DeviceMemory:
    """Return the memory of `device`."""
    if device.type != "cuda":
        return HostMemory()
    total = torch.cuda.get_device_properties(device).total_memory
    return CudaMemory(total, lambda: torch.cuda.memory_stats(device))


def let_segments_grow(environment: Mapping[str, str], set_settings: Callable[[str], None]) -> str:
    """Let the allocator grow its segments in place of adding new ones, unless the user has settings of his own.

    Call it before the first allocation. Returns what is to be said of it.
    """
    for name in ALLOCATOR_VARIABLES:
        if environment.get(name):
            return f"torch's allocator has the settings of {name}={environment[name]}"
    set_settings(GROWING_SEGMENTS)
    return ""


def set_allocator(settings: str) -> None:
    """Give settings to torch's allocator, in the way of this version of torch."""
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (newer or torch.cuda.memory._set_allocator_settings)(settings)
