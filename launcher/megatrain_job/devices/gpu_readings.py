"""The driver's readings of GPUs: the common form for NVML, nvidia-smi and DCGM's exporter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

THROTTLE_REASONS: Mapping[int, str] = {
    0x1: "idle",
    0x2: "clocks set by an administrator",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}
"""The reasons for reduced clocks, by bits of NVML and DCGM (NVML API reference, clocks event reasons)."""
FAULTY_REASONS = 0x8 | 0x20 | 0x40 | 0x80
"""Reasons that a healthy GPU in a healthy host does not have: too much heat, and too little power supply."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU. None: the driver does not report it, or this kind of GPU does not have it."""

    index: int
    uuid: str = ""
    name: str = ""
    uncorrected_errors: int | None = None
    """Memory errors since the driver was loaded."""
    is_page_retirement_pending: bool | None = None
    is_row_remap_pending: bool | None = None
    has_row_remap_failed: bool | None = None
    recovery_action: str = ""
    """The action that the driver asks for, such as "gpu reset"; empty: none, or the driver does not report it."""
    error: str = ""
    """The reason why the driver cannot read the GPU, which is lost or needs a reset; empty: no error."""
    pci_bus_id: str = ""
    mig_uuids: tuple[str, ...] = ()
    """UUIDs of the GPU's MIG devices; empty if it is not partitioned."""
    temperature_c: float | None = None
    slowdown_temperature_c: float | None = None
    """The temperature at which the hardware reduces the clocks."""
    memory_temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle_reasons: int | None = None
    """Bits of THROTTLE_REASONS."""
    power_w: float | None = None
    power_limit_w: float | None = None
    """The limit that is currently enforced."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization: float | None = None
    """Fraction of the time in which a kernel ran (0 to 1)."""
    corrected_errors: int | None = None
    """Memory errors since the driver was loaded."""
    lifetime_corrected_errors: int | None = None
    lifetime_uncorrected_errors: int | None = None
    retired_pages: int | None = None
    corrected_rows: int | None = None
    """Memory rows that were remapped after corrected errors."""
    uncorrected_rows: int | None = None
    nvlink_errors: int | None = None
    """Sum over all links of CRC errors, replays and recoveries."""
    pcie_replays: int | None = None
    last_xid: int | None = None
    """The last Xid error, from DCGM's exporter. NVML reports each error as it occurs instead."""


@dataclass(frozen=True, slots=True)
class DriverReading:
    """The readings of all GPUs of a host. error: why readings are missing or may be wrong; empty: no error."""

    source: str
    """nvml, nvidia-smi or dcgm; probe if the program that reads them failed; empty if the host has none of them."""
    version: str = ""
    error: str = ""
    gpus: tuple[GpuReading, ...] = ()


@dataclass(frozen=True, slots=True)
class XidEvent:
    """An error that the driver reported, with its time; megatrain_job.failures.xids has the meaning of the number."""

    at_unix_s: float
    uuid: str
    number: int


def throttle_text(reasons: int) -> str:
    """Return the throttle reasons in a bit mask as text; empty if there are none."""
    return ", ".join(word for bit, word in THROTTLE_REASONS.items() if reasons & bit)
