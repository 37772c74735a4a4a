"""Reads the GPUs through NVML's Python binding (package nvidia-ml-py, module pynvml), where that is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from megatrain_launcher.health.gpu_readings import DriverReading, GpuReading

_Value = TypeVar("_Value")

# NVML's numbers for what it asks for; 0 is nothing. Older drivers do not have the field.
_RECOVERY_ACTIONS = {
    1: "gpu reset",
    2: "reboot of the host",
    3: "drain of peer-to-peer traffic",
    4: "drain and gpu reset",
    5: "recovery of the IMEX domain",
    6: "bus reset",
    7: "reboot of the system",
}


def read_nvml() -> DriverReading | None:
    """Return what NVML says, None where there is no binding or no library: nvidia-smi may know more then."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if getattr(error, "value", None) == getattr(nvml, "NVML_ERROR_LIBRARY_NOT_FOUND", 12):
            return None
        return DriverReading("nvml", error=str(error))
    try:
        version = _text(_asked(nvml, nvml.nvmlSystemGetDriverVersion) or "")
        gpus = tuple(_read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        return DriverReading("nvml", version=version, gpus=gpus)
    except nvml.NVMLError as error:
        return DriverReading("nvml", error=str(error))
    finally:
        _asked(nvml, nvml.nvmlShutdown)


def _read_gpu(nvml: Any, index: int) -> GpuReading:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        name = _text(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError as error:
        return GpuReading(index, error=str(error))
    try:
        remapped = _supported(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(handle))
        retirement = _supported(nvml, lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
        return GpuReading(
            index,
            uuid,
            name,
            uncorrected_errors=_supported(
                nvml,
                lambda: int(
                    nvml.nvmlDeviceGetTotalEccErrors(
                        handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                    )
                ),
            ),
            is_page_retirement_pending=None if retirement is None else bool(retirement),
            is_row_remap_pending=None if remapped is None else bool(remapped[2]),
            has_row_remap_failed=None if remapped is None else bool(remapped[3]),
            recovery_action=_recovery_action(nvml, handle),
        )
    except nvml.NVMLError as error:  # lost, or in need of a reset
        return GpuReading(index, uuid, name, error=str(error))


def _recovery_action(nvml: Any, handle: Any) -> str:
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return ""
    values = _supported(nvml, lambda: nvml.nvmlDeviceGetFieldValues(handle, [field]))
    if not values or values[0].nvmlReturn != 0 or not values[0].value.uiVal:
        return ""
    number = int(values[0].value.uiVal)
    return _RECOVERY_ACTIONS.get(number, f"recovery action {number}")


def _supported(nvml: Any, ask: Callable[[], _Value]) -> _Value | None:
    """Return an answer, None where this GPU or driver has no such thing. Raises: NVMLError when the GPU is broken."""
    try:
        return ask()
    except nvml.NVMLError as error:
        broken = {
            getattr(nvml, name, None)
            for name in ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED", "NVML_ERROR_UNKNOWN")
        }
        if getattr(error, "value", None) in broken - {None}:
            raise
        return None


def _asked(nvml: Any, ask: Callable[[], _Value]) -> _Value | None:
    try:
        return ask()
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    """Older bindings answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
