"""One look at the GPUs and network interfaces of a host."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatrain.devices.gpu_readings import DriverReading, XidEvent
from megatrain.devices.links import SYS, LinkReading, read_links
from megatrain.devices.nvml import NvmlMissingError, NvmlSession

_logger = logging.getLogger(__name__)
_NOTHING = DriverReading("")
_LEAST_WAIT_S = 1.0
"""Between two readings, however many errors a GPU tells of."""


@dataclass(frozen=True, slots=True)
class HostSample:
    """What the drivers of a host said at a moment. `xids`: of the time since the sample before."""

    at_unix_s: float
    took_s: float
    driver: DriverReading = _NOTHING
    links: tuple[LinkReading, ...] = ()
    xids: tuple[XidEvent, ...] = ()


class GpuSource(Protocol):
    """What the GPUs are read through."""

    def read(self) -> DriverReading: ...

    def wait_for_xids(self, seconds: float) -> tuple[XidEvent, ...]:
        """Wait so long, or until there are errors; return them."""


class HostReader:
    """Reads a host, again and again. For one thread; a broken driver may never give it back."""

    def __init__(self, gpus: GpuSource, sys: Path = SYS) -> None:
        self._gpus, self._sys = gpus, sys
        self._xids: tuple[XidEvent, ...] = ()

    def read(self) -> HostSample:
        """Return what the drivers say now."""
        began = time.perf_counter()
        driver, links = self._gpus.read(), read_links(self._sys)
        xids, self._xids = self._xids, ()
        return HostSample(time.time(), time.perf_counter() - began, driver, links, xids)

    def wait(self, seconds: float) -> None:
        """Wait for the time of the next reading; an error of a GPU ends the wait."""
        began = time.monotonic()
        self._xids += self._gpus.wait_for_xids(seconds)
        time.sleep(max(0.0, min(seconds, _LEAST_WAIT_S) - (time.monotonic() - began)))


class NoGpus:
    """A machine without."""

    def read(self) -> DriverReading:
        return _NOTHING

    def wait_for_xids(self, seconds: float) -> tuple[XidEvent, ...]:
        time.sleep(seconds)
        return ()


def local_gpus() -> GpuSource:
    """Return the GPUs of this machine by NVML; none, said once, where library, driver or GPU is not there."""
    session = NvmlSession()
    try:
        found = session.read()
        missing = "" if found.gpus else found.error or "the driver has none"
    except NvmlMissingError as error:
        missing = str(error)
    if not missing:
        return session
    _logger.info("no GPU is read: %s", missing)
    session.close()
    return NoGpus()
