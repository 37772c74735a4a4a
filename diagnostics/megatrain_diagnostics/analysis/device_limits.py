"""From which values on a GPU or a link is in trouble, and who they are in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Ours, unless they say otherwise. Errors are counted over the last hour."""

    clock_drop: float = 0.05
    """Fraction of its earlier clock: a drop of this size is shown beside a straggler."""
    throttled_s: float = 30.0
    """So long a GPU may be slowed down by heat or its supply."""
    corrected_errors: int = 1000
    nvlink_errors: int = 100
    pcie_replays: int = 480
    """Eight a minute, as the health watch of NVIDIA's DCGM has it."""
    link_errors: int = 100
    """Of what a link received or sent, symbols included."""
    silent_s: float = 60.0
    silent_intervals: float = 5.0
    """Nothing of a host's devices for longer than both."""

    def silent_after_s(self, interval_s: float) -> float:
        return max(self.silent_s, self.silent_intervals * interval_s)


LIMITS = DeviceLimits()


def gpu_name(gpu: int, host: str, rank: int) -> str:
    """Return "GPU 3 of host-2 (rank 19)"."""
    return f"GPU {gpu} of {host}" + (f" (rank {rank})" if rank >= 0 else "")


def mhz_text(mhz: float) -> str:
    return f"{mhz:,.0f} MHz"
