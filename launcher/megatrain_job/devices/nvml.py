"""Reads the GPUs through NVML's Python binding (package nvidia-ml-py, module pynvml), if it is installed.

A call into a driver whose GPU is broken may never return, so readers run in a separate process.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from megatrain.contracts.closable import Closable
from megatrain_job.devices.gpu_readings import DriverReading, GpuReading, XidEvent

_Value = TypeVar("_Value")

# NVML's codes of recovery actions; 0: none. Older drivers do not have the field.
_RECOVERY_ACTIONS = {
    1: "gpu reset",
    2: "reboot of the host",
    3: "drain of peer-to-peer traffic",
    4: "drain and gpu reset",
    5: "recovery of the IMEX domain",
    6: "bus reset",
    7: "reboot of the system",
}
_RECOVERY_FIELD = "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"
_MEMORY_TEMPERATURE_FIELD = "NVML_FI_DEV_MEMORY_TEMP"
_NVLINK_FIELDS = (
    "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
)
_FIELDS = (_RECOVERY_FIELD, _MEMORY_TEMPERATURE_FIELD, *_NVLINK_FIELDS)
_MAX_MIG_DEVICES = 16
_MAX_XIDS = 64
"""The largest number of errors that one wait returns: a flood of errors must not prevent readings."""
_NUM_CAUSES = 2
"""Causes of retired pages are numbered 0 and 1."""
_TIMEOUT, _LIBRARY_NOT_FOUND = 10, 12
_BROKEN = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED", "NVML_ERROR_UNKNOWN")


class NvmlMissingError(Exception):
    """There is no binding, or no library, as on a machine without GPUs or without their driver."""


def read_nvml() -> DriverReading | None:
    """Return NVML's reading, None if there is no binding or no library: nvidia-smi may work then."""
    session = NvmlSession()
    try:
        with session:
            return session.read()
    except NvmlMissingError:
        return None


class NvmlSession(Closable):
    """NVML, opened once for many readings. Not thread-safe. After an error, the next reading opens it again."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._is_open = False
        self._events: Any = None

    def read(self) -> DriverReading:
        """Return the driver's current reading. Raises: NvmlMissingError."""
        problem = self._open()
        if problem:
            return DriverReading("nvml", error=problem)
        nvml = self._nvml
        try:
            version = _text(_asked(nvml, nvml.nvmlSystemGetDriverVersion) or "")
            gpus = tuple(_read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
            return DriverReading("nvml", version=version, gpus=gpus)
        except nvml.NVMLError as error:
            self.close()
            return DriverReading("nvml", error=str(error))

    def wait_for_xids(self, seconds: float) -> tuple[XidEvent, ...]:
        """Wait `seconds`, or until the driver reports an error; return the errors. Only `read` opens NVML; before that,
        there are none.
        """
        deadline = time.monotonic() + seconds
        found: list[XidEvent] = []
        while not found and (left_s := deadline - time.monotonic()) > 0.0:
            errors = self._wait(left_s) if self._is_open else None
            if errors is None:  # NVML is not open, or this driver reports no events
                time.sleep(left_s)
            else:
                found += errors
        while found and len(found) < _MAX_XIDS and (more := self._wait(0.0)):
            found += more
        return tuple(found)

    def close(self) -> None:
        if self._is_open:
            if self._events is not None:
                _asked(self._nvml, lambda: self._nvml.nvmlEventSetFree(self._events))
            _asked(self._nvml, self._nvml.nvmlShutdown)
        self._is_open, self._events = False, None

    def _open(self) -> str:
        """Open the library if it is not open; return the error if that fails. Raises: NvmlMissingError."""
        if self._is_open:
            return ""
        if self._nvml is None:
            try:
                self._nvml = importlib.import_module("pynvml")
            except ImportError as error:
                raise NvmlMissingError("the package nvidia-ml-py is not installed") from error
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            if _number(error) == _LIBRARY_NOT_FOUND:
                raise NvmlMissingError("there is no libnvidia-ml.so.1") from error
            return str(error)
        self._is_open = True
        return ""

    def _wait(self, seconds: float) -> list[XidEvent] | None:
        """Wait for one error. Return it; an empty list if none came; None if the driver does not report errors."""
        nvml = self._nvml
        if self._events is None and not self._listen():
            return None
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, max(0, int(1000 * seconds)))
        except nvml.NVMLError as error:
            return [] if _number(error) == _TIMEOUT else None
        uuid = _text(_asked(nvml, lambda: nvml.nvmlDeviceGetUUID(event.device)) or "")
        return [XidEvent(time.time(), uuid, int(event.eventData))]

    def _listen(self) -> bool:
        """Register for the errors of all GPUs that report errors; return whether there are any such GPUs."""
        nvml = self._nvml
        create = getattr(nvml, "nvmlEventSetCreate", None)
        events = _asked(nvml, create) if create is not None else None
        if events is None:
            return False
        num_registered = 0
        for index in range(_asked(nvml, nvml.nvmlDeviceGetCount) or 0):
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                num_registered += 1
        if not num_registered:
            _asked(nvml, lambda: nvml.nvmlEventSetFree(events))
            return False
        self._events = events
        return True


def _read_gpu(nvml: Any, index: int) -> GpuReading:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        name = _text(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError as error:
        return GpuReading(index, error=str(error))
    try:
        return _readable_gpu(nvml, _Asker(nvml, handle), index, uuid, name)
    except nvml.NVMLError as error:  # lost, or in need of a reset
        return GpuReading(index, uuid, name, error=str(error))


def _readable_gpu(nvml: Any, ask: _Asker, index: int, uuid: str, name: str) -> GpuReading:
    """Raises: NVMLError when the GPU is broken."""
    remapped, memory = ask("nvmlDeviceGetRemappedRows"), ask("nvmlDeviceGetMemoryInfo")
    retirement, fields = ask("nvmlDeviceGetRetiredPagesPendingStatus"), ask.fields(_FIELDS)
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    links = [fields[field] for field in _NVLINK_FIELDS if field in fields]
    power, limit = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
    utilization, pci = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetPciInfo")
    retired = [pages for cause in range(_NUM_CAUSES) if (pages := ask("nvmlDeviceGetRetiredPages", cause)) is not None]
    action = fields.get(_RECOVERY_FIELD, 0)
    return GpuReading(
        index,
        uuid,
        name,
        uncorrected_errors=ask.errors("UNCORRECTED", "VOLATILE"),
        is_page_retirement_pending=None if retirement is None else bool(retirement),
        is_row_remap_pending=None if remapped is None else bool(remapped[2]),
        has_row_remap_failed=None if remapped is None else bool(remapped[3]),
        recovery_action=_RECOVERY_ACTIONS.get(action, f"recovery action {action}") if action else "",
        pci_bus_id="" if pci is None else _text(pci.busId),
        mig_uuids=_mig_uuids(nvml, ask),
        temperature_c=ask("nvmlDeviceGetTemperature", ask.constant("NVML_TEMPERATURE_GPU")),
        slowdown_temperature_c=ask(
            "nvmlDeviceGetTemperatureThreshold", ask.constant("NVML_TEMPERATURE_THRESHOLD_SLOWDOWN", 1)
        ),
        memory_temperature_c=fields.get(_MEMORY_TEMPERATURE_FIELD),
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", ask.constant("NVML_CLOCK_SM", 1)),
        max_sm_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", ask.constant("NVML_CLOCK_SM", 1)),
        memory_clock_mhz=ask("nvmlDeviceGetClockInfo", ask.constant("NVML_CLOCK_MEM", 2)),
        # drivers before 535 have only the older name
        throttle_reasons=ask("nvmlDeviceGetCurrentClocksThrottleReasons") if reasons is None else reasons,
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        utilization=None if utilization is None else utilization.gpu / 100,
        corrected_errors=ask.errors("CORRECTED", "VOLATILE"),
        lifetime_corrected_errors=ask.errors("CORRECTED", "AGGREGATE"),
        lifetime_uncorrected_errors=ask.errors("UNCORRECTED", "AGGREGATE"),
        retired_pages=sum(map(len, retired)) if retired else None,
        corrected_rows=None if remapped is None else int(remapped[0]),
        uncorrected_rows=None if remapped is None else int(remapped[1]),
        nvlink_errors=sum(links) if links else None,
        pcie_replays=ask("nvmlDeviceGetPcieReplayCounter"),
    )


class _Asker:
    """Queries NVML about one GPU. A value that this GPU, driver or binding does not have is None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call an NVML function for the GPU, and return its result. Raises: NVMLError when the GPU is broken."""
        function = getattr(self._nvml, name, None)
        return None if function is None else _supported(self._nvml, lambda: function(self._handle, *arguments))

    def constant(self, name: str, usual: int = 0) -> int:
        return int(getattr(self._nvml, name, usual))

    def errors(self, kind: str, period: str) -> int | None:
        """Return the number of the GPU's memory errors. Raises: NVMLError when the GPU is broken."""
        error_type = self.constant(f"NVML_MEMORY_ERROR_TYPE_{kind}", kind == "UNCORRECTED")
        found = self(
            "nvmlDeviceGetTotalEccErrors", error_type, self.constant(f"NVML_{period}_ECC", period == "AGGREGATE")
        )
        return None if found is None else int(found)

    def fields(self, names: tuple[str, ...]) -> dict[str, int]:
        """Return the values of the existing fields by name. Raises: NVMLError when the GPU is broken."""
        numbers = {name: number for name in names if (number := getattr(self._nvml, name, None)) is not None}
        values = self("nvmlDeviceGetFieldValues", list(numbers.values())) if numbers else None
        named_values = zip(numbers, values or (), strict=False)
        return {name: int(value.value.ullVal if value.valueType in (2, 3) else value.value.uiVal)
                for name, value in named_values if value.nvmlReturn == 0}  # fmt: skip


def _mig_uuids(nvml: Any, ask: _Asker) -> tuple[str, ...]:
    mode = ask("nvmlDeviceGetMigMode")
    if not mode or not mode[0]:
        return ()
    found: list[str] = []
    for number in range(min(ask("nvmlDeviceGetMaxMigDeviceCount") or 0, _MAX_MIG_DEVICES)):
        device = ask("nvmlDeviceGetMigDeviceHandleByIndex", number)
        uuid = None if device is None else _asked(nvml, partial(nvml.nvmlDeviceGetUUID, device))
        if uuid:
            found.append(_text(uuid))
    return tuple(found)


def _supported(nvml: Any, ask: Callable[[], _Value]) -> _Value | None:
    """Return a query's result; None if GPU or driver do not support it. Raises: NVMLError when the GPU is broken."""
    try:
        return ask()
    except nvml.NVMLError as error:
        if _number(error) in {getattr(nvml, name, None) for name in _BROKEN} - {None}:
            raise
        return None


def _asked(nvml: Any, ask: Callable[[], _Value]) -> _Value | None:
    try:
        return ask()
    except nvml.NVMLError:
        return None


def _number(error: Exception) -> int | None:
    return getattr(error, "value", None)


def _text(value: str | bytes) -> str:
    """Return a text as str: older bindings return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
