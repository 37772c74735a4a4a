"""Types of the GPUs and links of a host: their newest readings, histories and errors."""

from __future__ import annotations

from megatrain_dashboard.responses.document import Document


class GpuDocument(Document):
    """A GPU at its last reading. Null: not reported by the driver. Histories: oldest first, null without a reading."""

    gpu: int
    uuid: str
    rank: int | None
    at_unix_s: float
    error: str
    """Why nothing is known of the GPU; empty: it answers."""
    recovery: str
    throttled: str
    """Text: why its clocks are throttled; empty: they are not."""
    fault: str
    """The reasons among these that a healthy GPU does not have: heat, and the power supply."""
    temperature_c: float | None
    slowdown_temperature_c: float | None
    memory_temperature_c: float | None
    sm_clock_mhz: float | None
    max_sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    power_w: float | None
    power_limit_w: float | None
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    utilization: float | None
    corrected_errors: float | None
    uncorrected_errors: float | None
    lifetime_corrected_errors: float | None
    lifetime_uncorrected_errors: float | None
    retired_pages: float | None
    corrected_rows: float | None
    uncorrected_rows: float | None
    is_reset_pending: bool
    has_remap_failed: bool
    nvlink_errors: float | None
    pcie_replays: float | None
    temperature_history: tuple[float | None, ...]
    clock_history: tuple[float | None, ...]
    power_history: tuple[float | None, ...]


class LinkDocument(Document):
    """A network interface or RDMA port at its newest reading; counters since its driver was loaded."""

    link: str
    at_unix_s: float
    is_up: bool
    state: str
    speed_mbps: float | None
    downs: float | None
    rx_errors: float | None
    tx_errors: float | None
    rx_dropped: float | None
    tx_dropped: float | None
    symbol_errors: float | None
    retransmissions: float | None
    error_history: tuple[float | None, ...]
    """The sum of receive, transmit and symbol errors in each stretch of time."""


class XidDocument(Document):
    """An error that NVIDIA's driver reported."""

    at_unix_s: float
    gpu: int | None
    rank: int | None
    step: int | None
    xid: int
    meaning: str
    kind: str
    """hardware, mended, program or clean-up."""
    advice: str


class HostDevicesDocument(Document):
    """The response of /hosts/{host}/devices; empty where nothing was ever read."""

    host: str
    first_unix_s: float | None
    last_unix_s: float | None
    """Histories reach from `first_unix_s` to `last_unix_s`."""
    problem: str
    """Why nothing newer is known; empty when all is well."""
    gpus: tuple[GpuDocument, ...]
    links: tuple[LinkDocument, ...]
    xids: tuple[XidDocument, ...]
    """The newest first."""
