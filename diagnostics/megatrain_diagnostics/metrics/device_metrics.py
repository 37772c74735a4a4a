"""Converts the readings of a host's devices to Prometheus metrics, in base units, with labels for GPU and link.

The number of samples is bounded: at most 16 GPUs and 32 links of a host are exported, and errors are counted by kind.
An unknown value has no sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from megatrain_diagnostics.devices.rows import is_reset_pending
from megatrain_diagnostics.metrics.families import counter, gauge
from megatrain_diagnostics.metrics.readings import DevicesReading
from megatrain_job.devices.gpu_readings import THROTTLE_REASONS, GpuReading
from megatrain_job.devices.links import LinkReading
from megatrain_job.failures.xids import XidKind, xid_of

MAX_GPUS = 16
MAX_LINKS = 32
_MEGA = 1e6

_GPU_GAUGES: tuple[tuple[str, str, Callable[[GpuReading], float | None]], ...] = (
    ("temperature_celsius", "Temperature of the GPU.", lambda gpu: gpu.temperature_c),
    ("memory_temperature_celsius", "Temperature of the GPU's memory.", lambda gpu: gpu.memory_temperature_c),
    ("slowdown_temperature_celsius", "Temperature at which the hardware slows the GPU down.",
     lambda gpu: gpu.slowdown_temperature_c),
    ("sm_clock_hertz", "Clock of the multiprocessors.", lambda gpu: _times(gpu.sm_clock_mhz, _MEGA)),
    ("max_sm_clock_hertz", "Highest clock of the multiprocessors.", lambda gpu: _times(gpu.max_sm_clock_mhz, _MEGA)),
    ("memory_clock_hertz", "Clock of the memory.", lambda gpu: _times(gpu.memory_clock_mhz, _MEGA)),
    ("power_watts", "Power that the GPU draws.", lambda gpu: gpu.power_w),
    ("power_limit_watts", "Enforced power limit.", lambda gpu: gpu.power_limit_w),
    ("memory_used_bytes", "Used memory of the GPU.", lambda gpu: gpu.memory_used_bytes),
    ("memory_bytes", "Memory of the GPU.", lambda gpu: gpu.memory_total_bytes),
    ("utilization_ratio", "Fraction of the time in which a kernel ran.", lambda gpu: gpu.utilization),
    ("retired_pages", "Retired pages of the GPU's memory.", lambda gpu: gpu.retired_pages),
    ("row_remap_failed", "1: a bad memory row could not be remapped.", lambda gpu: gpu.has_row_remap_failed),
    ("reset_pending", "1: the next reset retires a bad page or row.", is_reset_pending),
)  # fmt: skip
_GPU_COUNTERS: tuple[tuple[str, str, Callable[[GpuReading], Mapping[str, int | None]]], ...] = (
    ("ecc_errors", "Memory errors since the driver was loaded.",
     lambda gpu: {"corrected": gpu.corrected_errors, "uncorrected": gpu.uncorrected_errors}),
    ("lifetime_ecc_errors", "Memory errors in the GPU's lifetime.",
     lambda gpu: {"corrected": gpu.lifetime_corrected_errors, "uncorrected": gpu.lifetime_uncorrected_errors}),
    ("remapped_rows", "Remapped rows of the GPU's memory.",
     lambda gpu: {"corrected": gpu.corrected_rows, "uncorrected": gpu.uncorrected_rows}),
)  # fmt: skip
_LINK_GAUGES: tuple[tuple[str, str, Callable[[LinkReading], float | None]], ...] = (
    ("up", "1: the link is up.", lambda link: link.is_up),
    ("speed_bits_per_second", "Negotiated speed of the link.", lambda link: _times(link.speed_mbps, _MEGA)),
)
_LINK_ERRORS = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "symbol_errors", "retransmissions")


def device_metrics(devices: DevicesReading, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the metrics of a host's devices. `labels`: name -> value of the host's labels."""
    is_up = devices.sample is not None and not devices.problem
    yield gauge("megatrain_telemetry_up", "1: GPUs and network interfaces are read.", labels, [((), is_up)])
    if devices.sample is not None:
        yield from _gpus(devices.sample.driver.gpus[:MAX_GPUS], labels)
        yield from _links(devices.sample.links[:MAX_LINKS], labels)
    yield _xids(devices, labels)


def _gpus(gpus: Sequence[GpuReading], labels: Mapping[str, str]) -> Iterator[Metric]:
    where = [((str(gpu.index),), gpu) for gpu in gpus]
    identities = [((*at, gpu.uuid, gpu.name), 1) for at, gpu in where]
    text = "Identity of a GPU; always 1, for joins."
    yield gauge("megatrain_gpu_info", text, labels, identities, ["gpu", "gpu_uuid", "gpu_name"])
    lost = [(at, bool(gpu.error)) for at, gpu in where]
    yield gauge("megatrain_gpu_lost", "1: the driver cannot reach the GPU.", labels, lost, ["gpu"])
    throttled = [
        ((*at, word.replace(" ", "-")), bool(gpu.throttle_reasons & bit))
        for at, gpu in where
        if gpu.throttle_reasons is not None
        for bit, word in THROTTLE_REASONS.items()
    ]
    text = "1: the GPU's clocks are throttled for this reason."
    yield gauge("megatrain_gpu_throttled", text, labels, throttled, ["gpu", "reason"])
    for name, text, value in _GPU_GAUGES:
        yield gauge(f"megatrain_gpu_{name}", text, labels, [(at, value(gpu)) for at, gpu in where], ["gpu"])
    for name, text, values in _GPU_COUNTERS:
        found = [((*at, kind), count) for at, gpu in where for kind, count in values(gpu).items()]
        yield counter(f"megatrain_gpu_{name}", text, labels, found, ["gpu", "kind"])
    text = "CRC errors, replays and recoveries of the GPU's NVLinks."
    yield counter("megatrain_gpu_nvlink_errors", text, labels, [(at, gpu.nvlink_errors) for at, gpu in where], ["gpu"])
    text = "PCIe packets that were sent again."
    yield counter("megatrain_gpu_pcie_replays", text, labels, [(at, gpu.pcie_replays) for at, gpu in where], ["gpu"])


def _links(links: Sequence[LinkReading], labels: Mapping[str, str]) -> Iterator[Metric]:
    for name, text, value in _LINK_GAUGES:
        yield gauge(f"megatrain_link_{name}", text, labels, [((link.name,), value(link)) for link in links], ["link"])
    errors = [((link.name, kind.replace("_", "-")), getattr(link, kind)) for link in links for kind in _LINK_ERRORS]
    text = "Errors of a network interface or RDMA port."
    yield counter("megatrain_link_errors", text, labels, errors, ["link", "kind"])
    downs = [((link.name,), link.num_downs) for link in links]
    yield counter(
        "megatrain_link_downs",
        "Changes of the carrier (Ethernet), or how often the link was lost (InfiniBand).",
        labels,
        downs,
        ["link"],
    )


def _xids(devices: DevicesReading, labels: Mapping[str, str]) -> Metric:
    """Return the counter of Xid errors by GPU and kind; the Xid numbers are in the table xids."""
    gpus = () if devices.sample is None else devices.sample.driver.gpus[:MAX_GPUS]
    numbers = {gpu.uuid: str(gpu.index) for gpu in gpus}
    found: Counter[tuple[str, XidKind]] = Counter()
    for (uuid, number), count in devices.xids.items():
        found[numbers.get(uuid, ""), xid_of(number).kind] += count
    text = "Xid errors that the driver reported since the streamer started."
    return counter("megatrain_gpu_xids", text, labels, sorted(found.items()), ["gpu", "kind"])


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
