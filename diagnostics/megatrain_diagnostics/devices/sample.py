"""One reading of the GPUs and network interfaces of a host."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Protocol

from megatrain_job.devices.gpu_readings import DriverReading, XidEvent
from megatrain_job.devices.links import SYS, LinkReading, read_links
from megatrain_job.devices.nvml import NvmlMissingError, NvmlSession

_logger = logging.getLogger(__name__)
_NOTHING = DriverReading("")
_MIN_WAIT_S = 1.0
"""Least time between two readings, even if a GPU reports many errors."""


@dataclass(frozen=True, slots=True)
class HostSample:
    """The readings of a host's devices at one time. `xids`: errors since the previous sample."""

    at_unix_s: float
    took_s: float
    driver: DriverReading = _NOTHING
    links: tuple[LinkReading, ...] = ()
    xids: tuple[XidEvent, ...] = ()


class GpuSource(Protocol):
    """A way to read the GPUs."""

    def read(self) -> DriverReading: ...

    def wait_for_xids(self, seconds: float) -> tuple[XidEvent, ...]:
        """Wait for `seconds`, or until there are Xid errors; return the errors."""


class HostReader:
    """Reads a host repeatedly. For one thread; with a broken driver a call may never return."""

    def __init__(self, gpus: GpuSource) -> None:
        self._gpus = gpus
        self._xids: tuple[XidEvent, ...] = ()

    def read(self) -> HostSample:
        """Return the current readings."""
        began = time.perf_counter()
        driver, links = self._gpus.read(), read_links(SYS)
        xids, self._xids = self._xids, ()
        return HostSample(time.time(), time.perf_counter() - began, driver, links, xids)

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until a GPU reports an error."""
        began = time.monotonic()
        self._xids += self._gpus.wait_for_xids(seconds)
        time.sleep(max(0.0, min(seconds, _MIN_WAIT_S) - (time.monotonic() - began)))


class NoGpus:
    """The GpuSource of a machine without GPUs."""

    def read(self) -> DriverReading:
        return _NOTHING

    def wait_for_xids(self, seconds: float) -> tuple[XidEvent, ...]:
        time.sleep(seconds)
        return ()


def local_gpus() -> GpuSource:
    """Return NVML as source; if library, driver or GPU is missing, log this and return NoGpus."""
    session = NvmlSession()
    try:
        found = session.read()
        missing = "" if found.gpus else found.error or "the driver reports no GPU"
    except NvmlMissingError as error:
        missing = str(error)
    if not missing:
        return session
    _logger.info("no GPU is read: %s", missing)
    session.close()
    return NoGpus()
