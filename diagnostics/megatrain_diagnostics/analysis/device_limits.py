"""Limits beyond which a GPU or a link has a problem, and the names of GPUs in sentences."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Ours, unless another source is given. Errors are counted over the last hour."""

    clock_drop: float = 0.05
    """Fraction of its earlier clock: a drop of this size is shown as evidence for a straggler."""
    throttled_s: float = 30.0
    """How long heat or the power supply may throttle a GPU."""
    corrected_errors: int = 1000
    nvlink_errors: int = 100
    pcie_replays: int = 480
    """Eight a minute, the limit of the health watch of NVIDIA's DCGM."""
    link_errors: int = 100
    """Errors of received and sent data, symbol errors included."""
    silent_s: float = 60.0
    silent_intervals: float = 5.0
    """A host's devices are silent when there was no reading for longer than both."""

    def silent_after_s(self, interval_s: float) -> float:
        return max(self.silent_s, self.silent_intervals * interval_s)


LIMITS = DeviceLimits()


def gpu_name(gpu: int, host: str, rank: int) -> str:
    """Return "GPU 3 of host-2 (rank 19)"."""
    return f"GPU {gpu} of {host}" + (f" (rank {rank})" if rank >= 0 else "")


def mhz_text(mhz: float) -> str:
    return f"{mhz:,.0f} MHz"
