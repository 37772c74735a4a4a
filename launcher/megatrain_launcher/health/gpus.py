"""Checks the GPUs: all are present, the driver works, and none has broken memory or needs a reset."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.files.system_files import system_text
from megatrain.contracts.records.record import decode
from megatrain.formatting import count_text
from megatrain_job.devices.gpu_readings import DriverReading, GpuReading
from megatrain_launcher.health.context import HealthContext, HealthFinding, failed, passed, skipped, warning
from megatrain_launcher.health.history import HealthHistory

NAMES = ("gpu-driver", "gpu-count", "gpu-state")
DEADLINE_S = 30.0
_SEEN = "num_gpus"
_MISMATCH = re.compile(r"mismatch", re.IGNORECASE)


def check_gpus(context: HealthContext, history: HealthHistory) -> tuple[HealthFinding, ...]:
    """Query the driver in a separate process and judge its reading."""
    if context.device == "cpu":
        return tuple(skipped(name, "runtime.device is cpu") for name in NAMES)
    margin_s = 5.0  # for the start of the probe, and to report that nvidia-smi does not respond
    end = context.probe(
        "gpu_probe",
        [f"{DEADLINE_S - 2 * margin_s:g}"],
        environment=context.environment,
        deadline_s=DEADLINE_S - margin_s,
    )
    if end.is_complete:
        try:
            reading = decode(DriverReading, end.output, "the GPU probe's output")
        except CoordinationError as error:
            reading = DriverReading("probe", error=str(error))
    else:
        reading = DriverReading("probe", error=f"querying the driver failed ({end.problem})")
    return judge_gpus(
        reading,
        device=context.device,
        num_workers=context.num_workers,
        visible=context.environment.get("CUDA_VISIBLE_DEVICES"),
        num_before=int(history.seen.get(_SEEN, 0)),
        kernel_module=kernel_module_version(context.places.proc),
    )


def judge_gpus(
    reading: DriverReading,
    *,
    device: str,
    num_workers: int,
    visible: str | None,
    num_before: int,
    kernel_module: str,
) -> tuple[HealthFinding, ...]:
    """Return the findings of a reading.

    `num_before`: the number of GPUs in this host's history, 0 without one; `visible`: CUDA_VISIBLE_DEVICES.
    """
    is_expected = device == "cuda" or num_before > 0
    if not reading.gpus:
        return _without_gpus(reading, is_expected, num_before, kernel_module)
    driver = _judge_driver(reading, kernel_module)
    chosen = _visible(reading.gpus, visible)
    return driver, _judge_count(reading, chosen, num_workers, num_before, visible), _judge_state(chosen)


def kernel_module_version(proc: Path) -> str:
    """Return the version of the kernel's NVIDIA driver; empty if none is loaded."""
    version = system_text(proc / "driver/nvidia/version")
    found = re.search(r"Kernel Module\D*(?:for \S+\s+)?(\d+\.\d+(?:\.\d+)?)", version)
    return found[1] if found else ""


def _without_gpus(
    reading: DriverReading, is_expected: bool, num_before: int, kernel_module: str
) -> tuple[HealthFinding, ...]:
    reason = reading.error or ("no GPU found" if reading.source else "neither NVML nor nvidia-smi is installed")
    advice = _advice(reading.error)
    before = f"; this host had {num_before} before" if num_before else ""
    rest = tuple(skipped(name, reason) for name in NAMES[2:])
    if is_expected:
        return failed(NAMES[0], f"{reason}{before}{advice}"), failed(NAMES[1], f"no GPU{before}"), *rest
    if reading.error:
        return (
            warning(NAMES[0], f"{reason}; workers would compute on the CPU{advice}"),
            skipped(NAMES[1], reason),
            *rest,
        )
    if kernel_module:
        # normal in a container without GPUs on a host with GPUs, but a broken installation gives the same result
        return passed(NAMES[0], f"driver {kernel_module} is loaded, but {reason}"), skipped(NAMES[1], reason), *rest
    return skipped(NAMES[0], reason), skipped(NAMES[1], reason), *rest


def _judge_driver(reading: DriverReading, kernel_module: str) -> HealthFinding:
    name = NAMES[0]
    if reading.error:
        return failed(name, f"{reading.error}{_advice(reading.error)}")
    if kernel_module and reading.version and kernel_module != reading.version:
        return failed(
            name, f"the kernel has driver {kernel_module}, but the library is of version {reading.version}{_REBOOT}"
        )
    return passed(name, f"driver {reading.version or 'of unknown version'}, read with {reading.source}")


def _judge_count(
    reading: DriverReading, chosen: Sequence[GpuReading], num_workers: int, num_before: int, visible: str | None
) -> HealthFinding:
    found = len(reading.gpus)
    state = count_text(found, "GPU")
    state += "" if len(chosen) == found else f", {len(chosen)} by CUDA_VISIBLE_DEVICES={visible}"
    if found < num_before:
        finding = failed(NAMES[1], f"{state}; this host had {num_before} before: see the kernel log for lost GPUs")
        return replace(finding, value=found, unit="GPUs")
    if len(chosen) < num_workers:
        workers = count_text(num_workers, "worker")
        problem = f"{state} for {workers}; start fewer workers on each host, or make more GPUs visible"
        return replace(failed(NAMES[1], problem), value=found, unit="GPUs", seen={_SEEN: found})
    return replace(passed(NAMES[1], state), value=found, unit="GPUs", seen={_SEEN: found})


def _judge_state(gpus: Sequence[GpuReading]) -> HealthFinding:
    name = NAMES[2]
    broken = [problem for gpu in gpus for problem in _problems(gpu)]
    if broken:
        return failed(name, "; ".join(broken) + "; reset or replace it")
    noted = [
        f"GPU {gpu.index}: {count_text(gpu.uncorrected_errors, 'uncorrected memory error')} since the driver was loaded"
        for gpu in gpus
        if gpu.uncorrected_errors
    ]
    if noted:  # no reset is pending: the memory was repaired or disabled
        return warning(name, "; ".join(noted))
    names = ", ".join(sorted({gpu.name for gpu in gpus if gpu.name}))
    return passed(name, f"{names or 'GPUs'}: no memory errors, nothing pending")


def _problems(gpu: GpuReading) -> list[str]:
    who = f"GPU {gpu.index}" + (f" ({gpu.uuid})" if gpu.uuid else "")
    problems: Mapping[str, bool | None] = {
        f"{who} does not answer: {gpu.error}": bool(gpu.error),
        f"{who}: remapping a row of its memory failed": gpu.has_row_remap_failed,
        f"{who}: the remapping of a row of its memory waits for a reset": gpu.is_row_remap_pending,
        f"{who}: the retirement of a page of its memory waits for a reset": gpu.is_page_retirement_pending,
        f"{who}: the driver asks for {gpu.recovery_action}": bool(gpu.recovery_action),
    }
    return [problem for problem, is_so in problems.items() if is_so]


def _visible(gpus: Sequence[GpuReading], visible: str | None) -> tuple[GpuReading, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects; all if it has names of another kind (MIG)."""
    if visible is None:
        return tuple(gpus)
    wanted = [word.strip() for word in visible.split(",") if word.strip()]
    if not all(word.isdigit() or word.startswith("GPU-") or word == "-1" for word in wanted):
        return tuple(gpus)
    return tuple(
        gpu
        for gpu in gpus
        if any(word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word)) for word in wanted)
    )


_REBOOT = "; the driver was updated under running programs: reboot, or reload its modules"


def _advice(error: str) -> str:
    return _REBOOT if _MISMATCH.search(error) else ""
