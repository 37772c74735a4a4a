"""The memory of a worker's device while it trains: how much is used, and whether torch's allocator had to retry.

A step allocates the same tensors as the step before it, so after some steps torch requests no further memory from the
driver. If free memory is then fragmented into pieces of the wrong sizes, torch returns its free memory to the driver
and allocates again, and the GPU waits. The count of such retries shows how often this happens; device_settings.py makes
retries rare. Source: torch's notes on CUDA memory management (memory_stats).
"""

from __future__ import annotations

import logging
import resource
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatrain.formatting import count_text
from megatrain.training.observers.step_observer import CompletedStep, StepObserver

_logger = logging.getLogger(__name__)
SETTLED_AFTER_STEPS = 3
_GIB = 1 << 30


class DeviceMemory(StepObserver, ABC):
    """The memory of a worker's device."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the peak memory of this process."""


class HostMemory(DeviceMemory):
    """The memory of a process without an accelerator."""

    def peak_bytes(self) -> int:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class CudaMemory(DeviceMemory):
    """The memory of one GPU. Warns in this rank's own log when the allocator had to retry."""

    def __init__(self, total_bytes: int, read_statistics: Callable[[], Mapping[str, Any]]) -> None:
        self._total_bytes = total_bytes
        self._read_statistics = read_statistics
        self._num_steps = 0
        self._num_retries = 0
        self._warn_at = 1

    def peak_bytes(self) -> int:
        return int(self._read_statistics().get("allocated_bytes.all.peak", 0))

    def after_step(self, done: CompletedStep) -> str:
        """Return a line about the memory in use after SETTLED_AFTER_STEPS steps; after other steps an empty text."""
        statistics = self._read_statistics()
        self._num_steps += 1
        self._watch_retries(done.progress.step, statistics.get("num_alloc_retries", 0))
        if self._num_steps != SETTLED_AFTER_STEPS:
            return ""
        tensors, held = (statistics.get(f"{kind}_bytes.all.peak", 0) for kind in ("allocated", "reserved"))
        return (
            f"GPU memory: tensors took at most {tensors / _GIB:.1f} GiB, and torch held at most {held / _GIB:.1f} of "
            f"{self._total_bytes / _GIB:.1f} GiB"
        )

    def _watch_retries(self, step: int, num_retries: int) -> None:
        """Warn of the first retry, and again when the count has doubled: a full GPU has retries in every step."""
        if num_retries > self._num_retries and num_retries >= self._warn_at:
            _logger.warning(
                "step %d: the GPU's memory was full and torch has released its cached memory %s so far, which "
                "stalls the GPU each time; see parallel.recompute, parallel.offload_layers and `megatrain config check "
                "--dry-run`",
                step,
                count_text(num_retries, "time"),
            )
            self._warn_at = 2 * num_retries
        self._num_retries = num_retries


def device_memory(device: torch.device) -> DeviceMemory:
    """Return the memory of `device`."""
    if device.type != "cuda":
        return HostMemory()
    total = torch.cuda.get_device_properties(device).total_memory
    return CudaMemory(total, lambda: torch.cuda.memory_stats(device))
