"""What the driver says of each GPU: the form in which NVML and nvidia-smi are read, and the way to the executor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU. None: the driver does not say, or this kind of GPU does not have it."""

    index: int
    uuid: str = ""
    name: str = ""
    uncorrected_errors: int | None = None
    """Of memory, since the driver was loaded."""
    is_page_retirement_pending: bool | None = None
    is_row_remap_pending: bool | None = None
    has_row_remap_failed: bool | None = None
    recovery_action: str = ""
    """What the driver itself asks for, "gpu reset" for instance; empty: nothing, or it is too old to say."""
    error: str = ""
    """The driver cannot reach it: lost, or it needs a reset."""


@dataclass(frozen=True, slots=True)
class DriverReading:
    """All GPUs of a host as its driver sees them. `error`: the driver cannot be asked."""

    source: str
    """nvml, nvidia-smi, or empty where there is neither."""
    version: str = ""
    error: str = ""
    gpus: tuple[GpuReading, ...] = ()
