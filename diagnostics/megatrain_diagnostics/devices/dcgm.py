"""Reads the GPUs from the metrics page of NVIDIA's DCGM exporter, instead of NVML.

This is for hosts on which only one program should query the driver. Values that the exporter does not serve are None.
Source of names and units of fields: NVIDIA's DCGM API reference (field identifiers); of labels: the exporter.
"""

from __future__ import annotations

import logging
import math
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from megatrain.contracts.network_address import is_loopback
from megatrain_job.devices.gpu_readings import DriverReading, GpuReading, XidEvent

_logger = logging.getLogger(__name__)
_TIMEOUT_S = 5.0
_MAX_BYTES = 8 << 20
_MAX_GPUS = 64
_MAX_SHOWN = 200
"""Number of characters of an unreadable line that are logged."""
_MIB = 1 << 20
_PREFIX = "DCGM_FI_DEV_"
_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "temperature_c": ("GPU_TEMP",),
    "slowdown_temperature_c": ("SLOWDOWN_TEMP",),
    "memory_temperature_c": ("MEMORY_TEMP",),
    "sm_clock_mhz": ("SM_CLOCK",),
    "max_sm_clock_mhz": ("MAX_SM_CLOCK",),
    "memory_clock_mhz": ("MEM_CLOCK",),
    "power_w": ("POWER_USAGE",),
    "power_limit_w": ("ENFORCED_POWER_LIMIT", "POWER_MGMT_LIMIT"),
}
"""Field of a reading, a real number -> fields of DCGM; the first one that exists is used."""
_COUNTS: Mapping[str, tuple[str, ...]] = {
    "throttle_reasons": ("CLOCKS_EVENT_REASONS", "CLOCK_THROTTLE_REASONS"),
    "corrected_errors": ("ECC_SBE_VOL_TOTAL",),
    "uncorrected_errors": ("ECC_DBE_VOL_TOTAL",),
    "lifetime_corrected_errors": ("ECC_SBE_AGG_TOTAL",),
    "lifetime_uncorrected_errors": ("ECC_DBE_AGG_TOTAL",),
    "corrected_rows": ("CORRECTABLE_REMAPPED_ROWS",),
    "uncorrected_rows": ("UNCORRECTABLE_REMAPPED_ROWS",),
    "pcie_replays": ("PCIE_REPLAY_COUNTER",),
    "last_xid": ("XID_ERRORS",),
}
_FLAGS: Mapping[str, str] = {
    "is_page_retirement_pending": "RETIRED_PENDING",
    "is_row_remap_pending": "ROW_REMAP_PENDING",
    "has_row_remap_failed": "ROW_REMAP_FAILURE",
}
_RETIRED = ("RETIRED_SBE", "RETIRED_DBE")
_SHARED_BY_INSTANCES = ("FB_USED", "FB_FREE", "FB_RESERVED", "FB_TOTAL")
"""Fields to sum over MIG instances. For other fields, an instance reports the value of its GPU."""
_OTHER_DEVICES = frozenset({"nvswitch", "nvlink", "cpu", "cpucore"})
"""Labels of the exporter's lines about switches, their links and CPUs, which have no label `gpu`."""
_NVLINK = tuple(f"NVLINK_{what}_ERROR_COUNT_TOTAL" for what in ("CRC_FLIT", "CRC_DATA", "REPLAY", "RECOVERY"))


class DcgmExporter:
    """Reads the GPUs of this host from the exporter at a URL."""

    def __init__(self, url: str, fetch: Callable[[str], str] | None = None) -> None:
        self._url, self._fetch = url, fetch or fetched
        self._last_xids: dict[str, int] = {}
        self._new_xids: tuple[XidEvent, ...] = ()
        self._unreadable = ""

    def read(self) -> DriverReading:
        """Return the current readings; an error of fetching or parsing is in `DriverReading.error`."""
        try:
            samples, unreadable = read_samples(self._fetch(self._url))
            found = reading_of(samples)
        except (OSError, ValueError) as error:
            return DriverReading("dcgm", error=f"diagnostics.dcgm_url={self._url}: {error}")
        # compared without the value, which may differ at each reading, so that a line is logged once
        first = unreadable[0].rpartition("}")[0] or unreadable[0].partition(" ")[0] if unreadable else ""
        if first and first != self._unreadable:
            self._unreadable = first
            _logger.warning(
                "diagnostics.dcgm_url=%s: %d lines of the page cannot be read and are skipped, the first: %r",
                self._url, len(unreadable), unreadable[0][:_MAX_SHOWN],
            )  # fmt: skip
        for gpu in found.gpus:
            self._record_xid(gpu)
        return found

    def wait_for_xids(self, seconds: float) -> tuple[XidEvent, ...]:
        """Return the errors of the last reading; if there are none, first wait for `seconds`."""
        if not self._new_xids:
            time.sleep(seconds)
        xids, self._new_xids = self._new_xids, ()
        return xids

    def _record_xid(self, gpu: GpuReading) -> None:
        """Record a new Xid error. The exporter repeats the last number until the driver is reloaded."""
        before = self._last_xids.get(gpu.uuid)
        if gpu.last_xid is not None:
            self._last_xids[gpu.uuid] = gpu.last_xid
            if before is not None and gpu.last_xid not in (0, before):
                self._new_xids = (*self._new_xids, XidEvent(time.time(), gpu.uuid, gpu.last_xid))


def read_samples(text: str) -> tuple[list[Sample], list[str]]:
    """Return the samples of the GPUs on an exporter's page, and the lines that cannot be used.

    An unusable line cannot be parsed, names no GPU, or has no finite value. Lines about switches and CPUs are left out.
    """
    samples: list[Sample] = []
    unreadable: list[str] = []
    for line in text.splitlines():
        if not line.startswith(_PREFIX):
            continue
        try:
            found = [sample for family in text_string_to_metric_families(line) for sample in family.samples]
        except (ValueError, IndexError):
            unreadable.append(line)
            continue
        of_gpus = [sample for sample in found if "gpu" in sample.labels or _OTHER_DEVICES.isdisjoint(sample.labels)]
        if all(map(_is_of_gpu, of_gpus)):
            samples += of_gpus
        else:
            unreadable.append(line)
    return samples, unreadable


def _is_of_gpu(sample: Sample) -> bool:
    gpu = sample.labels.get("gpu", "")
    return gpu.isascii() and gpu.isdigit() and math.isfinite(sample.value)


def reading_of(samples: Iterable[Sample]) -> DriverReading:
    """Return the GPUs in the samples of `read_samples`. Raises: ValueError if no sample is of a GPU."""
    by_gpu: dict[str, dict[str, float]] = {}
    labels_of: dict[str, Mapping[str, str]] = {}
    for gpu, labels, field, value in _values(samples):
        if gpu in by_gpu or len(by_gpu) < _MAX_GPUS:
            by_gpu.setdefault(gpu, {})[field] = value
            labels_of.setdefault(gpu, labels)
    if not by_gpu:
        raise ValueError("the page has no GPU fields; is this the URL of NVIDIA's DCGM exporter?")
    gpus = (_gpu(int(gpu), labels_of[gpu], by_gpu[gpu]) for gpu in sorted(by_gpu, key=int))
    return DriverReading("dcgm", next(iter(labels_of.values())).get("DCGM_FI_DRIVER_VERSION", ""), "", tuple(gpus))


def _values(samples: Iterable[Sample]) -> Iterator[tuple[str, Mapping[str, str], str, float]]:
    """Yield (GPU, labels, field, value). MIG instances are combined for fields that the GPU itself does not report."""
    of_instances: dict[tuple[str, str], list[Sample]] = {}
    of_gpus = set[tuple[str, str]]()
    for sample in samples:
        gpu, field = sample.labels["gpu"], sample.name.removeprefix(_PREFIX)
        if sample.labels.get("GPU_I_ID"):
            of_instances.setdefault((gpu, field), []).append(sample)
        else:
            of_gpus.add((gpu, field))
            yield gpu, sample.labels, field, sample.value
    for (gpu, field), found in of_instances.items():
        if (gpu, field) not in of_gpus:
            combined = sum if field in _SHARED_BY_INSTANCES else max
            yield gpu, found[0].labels, field, combined(sample.value for sample in found)


def fetched(url: str) -> str:
    """Return the page at a URL; a proxy of the environment is not used for loopback. Raises: OSError."""
    proxies: dict[str, str] | None = {} if is_loopback(urlsplit(url).hostname or "") else None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
    with opener.open(url, timeout=_TIMEOUT_S) as answer:
        page: bytes = answer.read(_MAX_BYTES)
    return page.decode(errors="replace")


def _gpu(index: int, labels: Mapping[str, str], fields: Mapping[str, float]) -> GpuReading:
    found: dict[str, Any] = {name: _first(fields, names) for name, names in _NUMBERS.items()}
    found |= {name: _whole(_first(fields, names)) for name, names in _COUNTS.items()}
    found |= {name: None if field not in fields else fields[field] > 0 for name, field in _FLAGS.items()}
    used, utilization = _first(fields, ("FB_USED",)), _first(fields, ("GPU_UTIL",))
    parts = [fields.get(name) for name in ("FB_USED", "FB_FREE", "FB_RESERVED")]
    total = _first(fields, ("FB_TOTAL",))
    if total is None and parts[0] is not None and parts[1] is not None:
        total = sum(part for part in parts if part is not None)
    return GpuReading(
        index,
        labels.get("UUID", ""),
        labels.get("modelName", ""),
        pci_bus_id=labels.get("pci_bus_id", ""),
        memory_used_bytes=None if used is None else int(used * _MIB),
        memory_total_bytes=None if total is None else int(total * _MIB),
        utilization=None if utilization is None else utilization / 100,
        retired_pages=_whole(_sum(fields, _RETIRED)),
        nvlink_errors=_whole(_sum(fields, _NVLINK)),
        **found,
    )


def _first(fields: Mapping[str, float], names: Iterable[str]) -> float | None:
    """Return the first of these fields that exists; a negative value is not a reading of any of them."""
    return next((value for name in names if (value := fields.get(name)) is not None and value >= 0.0), None)


def _sum(fields: Mapping[str, float], names: Iterable[str]) -> float | None:
    """Return the sum of those of these fields that exist, as in `_first`; None without any."""
    found = [fields[name] for name in names if fields.get(name, -1.0) >= 0.0]
    return sum(found) if found else None


def _whole(value: float | None) -> int | None:
    # DCGM's numbers for "no value" lie just below 2**63
    return int(value) if value is not None and value < 2.0**62 else None
