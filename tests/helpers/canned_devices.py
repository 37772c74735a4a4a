"""The GPUs and links of an invented host, as the page gets them: created from rows as the streamer creates them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from megatrain_dashboard.api.devices import HostDevicesDocument, host_devices_document
from megatrain_diagnostics.devices.rows import HostPlace, device_tables
from megatrain_diagnostics.devices.sample import HostSample
from megatrain_diagnostics.events.tables import Gpus, NetworkLinks, Xids, joined
from megatrain_diagnostics.store.device_queries import HostDeviceRows
from megatrain_job.devices.gpu_readings import DriverReading, GpuReading, XidEvent
from megatrain_job.devices.links import LinkReading

NUM_GPUS = 8
_HOT_GPU, _LOST_GPU, _TIRED_GPU = 3, 6, 5
_NUM_READINGS, _EACH_S = 60, 60.0
_HOT_FROM = 35


def host_devices(host: str, first_rank: int, now_s: float, *, has_problems: bool) -> HostDevicesDocument:
    """Return one hour of a host with eight H100s and nine links; `has_problems`: with problems of several kinds."""
    found: dict[Any, list[Any]] = {Gpus: [], NetworkLinks: [], Xids: []}
    for number in range(_NUM_READINGS):
        at_s = now_s - _EACH_S * (_NUM_READINGS - 1 - number)
        place = HostPlace(
            host, 2, 20 * number, {f"GPU-{gpu}": (first_rank + gpu, 20 * number) for gpu in range(NUM_GPUS)}
        )
        for kind, table in device_tables(_sample(at_s, number, has_problems=has_problems), place):
            found[kind].append(table)
    rows = HostDeviceRows(*(joined(kind, found[kind]) for kind in (Gpus, NetworkLinks, Xids)))
    return host_devices_document(host, rows, int((now_s - 3600) * 1e9), int(now_s * 1e9))


def _sample(at_s: float, number: int, *, has_problems: bool) -> HostSample:
    xids = []
    if has_problems and number == _HOT_FROM:
        xids = [XidEvent(at_s, f"GPU-{_TIRED_GPU}", 94), XidEvent(at_s + 1, f"GPU-{_LOST_GPU}", 79)]
    gpus = tuple(_gpu(gpu, number, has_problems=has_problems) for gpu in range(NUM_GPUS))
    links = [LinkReading("ens1", True, "up", 100_000.0, 2, 0, 0, 12, 0)]
    links += [
        LinkReading(f"mlx5_{one}:1", True, "ACTIVE, LinkUp", 400_000.0, 0, 0, 0, 0, 3, 0, 17) for one in range(NUM_GPUS)
    ]
    if has_problems:
        links[2] = replace(
            links[2], speed_mbps=200_000.0, num_downs=3, rx_errors=max(0, number - 40) ** 2, symbol_errors=7
        )
        links[4] = replace(links[4], is_up=False, state="DOWN, Polling", speed_mbps=None, num_downs=9)
    return HostSample(at_s, 0.01, DriverReading("nvml", gpus=gpus), tuple(links), tuple(xids))


def _gpu(gpu: int, number: int, *, has_problems: bool) -> GpuReading:
    wave = math.sin(number / 3 + gpu)
    found = GpuReading(
        gpu, f"GPU-{gpu}", "NVIDIA H100 80GB HBM3",
        uncorrected_errors=0, is_row_remap_pending=False, has_row_remap_failed=False, temperature_c=62 + gpu + 2 * wave,
        slowdown_temperature_c=89.0, memory_temperature_c=74.0, sm_clock_mhz=1980 - 15 * abs(wave),
        max_sm_clock_mhz=1980.0, memory_clock_mhz=2619.0, throttle_reasons=0x4 if wave > 0.7 else 0,
        power_w=640 + 30 * wave, power_limit_w=700.0, memory_used_bytes=71_500_000_000,
        memory_total_bytes=85_520_809_984, utilization=0.98, corrected_errors=0, lifetime_corrected_errors=gpu,
        lifetime_uncorrected_errors=0, corrected_rows=0, uncorrected_rows=0, nvlink_errors=0, pcie_replays=0,
    )  # fmt: skip
    if not has_problems or number < _HOT_FROM:
        return found
    if gpu == _LOST_GPU:
        return GpuReading(gpu, f"GPU-{gpu}", error="GPU is lost")
    if gpu == _TIRED_GPU:
        return replace(found, corrected_errors=41, uncorrected_errors=1, uncorrected_rows=1, is_row_remap_pending=True)
    if gpu == _HOT_GPU:
        return replace(found, temperature_c=91.0, sm_clock_mhz=1050.0, power_w=512.0, throttle_reasons=0x44)
    return found
