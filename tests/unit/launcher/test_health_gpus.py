"""GPU checks: the output of NVML and nvidia-smi, its meaning, and Xid messages in the kernel's log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from megatrain.contracts.records.host_records import CheckOutcome
from megatrain.contracts.records.job_keys import JobKeys
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.devices.gpu_readings import DriverReading, GpuReading
from megatrain_job.devices.nvml import read_nvml
from megatrain_launcher.executor import host_checks
from megatrain_launcher.executor.settings import ExecutorSettings
from megatrain_launcher.health import gpus, kernel_log
from megatrain_launcher.health.checks import Check, run_checks
from megatrain_launcher.health.context import Places
from megatrain_launcher.health.history import HealthHistory
from megatrain_launcher.health.nvidia_smi import read_nvidia_smi
from tests.helpers.health_contexts import health_context
from tests.helpers.single_rank import make_config

GOOD = GpuReading(0, "GPU-aaaa", "H100", 0, False, False, False)


def judged(reading: DriverReading, **changes):
    arguments = {"device": "auto", "num_workers": 1, "visible": None, "num_before": 0, "kernel_module": ""}
    return gpus.judge_gpus(reading, **{**arguments, **changes})


def of(*readings: GpuReading, **changes) -> DriverReading:
    return DriverReading("nvml", **{"version": "550.54.15", "gpus": readings, **changes})


def test_outcome_of_each_gpu_reading() -> None:
    for reading, changes, outcomes, detail in [
        (of(GOOD), {}, ("passed", "passed", "passed"), "550.54.15"),
        (DriverReading(""), {}, ("skipped", "skipped", "skipped"), "neither"),
        (DriverReading(""), {"device": "cuda"}, ("failed", "failed", "skipped"), "no GPU"),
        (DriverReading(""), {"num_before": 8}, ("failed", "failed", "skipped"), "had 8 before"),
        (DriverReading(""), {"kernel_module": "535.1"}, ("passed", "skipped", "skipped"), "535.1 is loaded"),
        (DriverReading("nvml", error="boom"), {}, ("warning", "skipped", "skipped"), "on the CPU"),
        (
            DriverReading("nvml", error="version mismatch"),
            {"device": "cuda"},
            ("failed", "failed", "skipped"),
            "reboot",
        ),
        (of(GOOD), {"kernel_module": "550.90.07"}, ("failed", "passed", "passed"), "550.90.07"),
        (of(GOOD), {"kernel_module": "550.54.15"}, ("passed", "passed", "passed"), "550.54.15"),
        (of(GOOD), {"num_workers": 2}, ("passed", "failed", "passed"), "for 2 workers"),
        (of(GOOD), {"num_before": 2}, ("passed", "failed", "passed"), "had 2 before"),
        (of(GOOD, replace(GOOD, index=1, error="GPU is lost")), {}, ("passed", "passed", "failed"), "GPU is lost"),
        (of(GOOD, replace(GOOD, index=1, error="lost")), {"visible": "0"}, ("passed", "passed", "passed"), "1 by CUDA"),
        (of(GOOD, replace(GOOD, index=1)), {"visible": "", "num_workers": 1}, ("passed", "failed", "passed"), "0 by"),
        (of(replace(GOOD, is_row_remap_pending=True)), {}, ("passed", "passed", "failed"), "waits for a reset"),
        (of(replace(GOOD, has_row_remap_failed=True)), {}, ("passed", "passed", "failed"), "remapping a row"),
        (of(replace(GOOD, is_page_retirement_pending=True)), {}, ("passed", "passed", "failed"), "retirement"),
        (of(replace(GOOD, recovery_action="gpu reset")), {}, ("passed", "passed", "failed"), "asks for gpu reset"),
        (of(replace(GOOD, uncorrected_errors=3)), {}, ("passed", "passed", "warning"), "3 uncorrected"),
        (of(GOOD, error="GPU 1 is lost"), {}, ("failed", "passed", "passed"), "GPU 1 is lost"),
    ]:
        findings = judged(reading, **changes)
        assert tuple(finding.name for finding in findings) == gpus.NAMES, (reading, changes)
        assert tuple(finding.outcome for finding in findings) == outcomes, (reading, changes)
        assert detail in " ".join(finding.detail for finding in findings), (reading, changes)


def test_lost_gpu_is_missing_at_every_check() -> None:
    """The history keeps the earlier number, so the second check fails like the first."""
    count = judged(of(GOOD), num_before=2)[1]
    assert "num_gpus" not in count.seen
    assert judged(of(GOOD))[1].seen == {"num_gpus": 1}


def test_version_of_the_kernel_module(tmp_path: Path) -> None:
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    for text, version in [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n", "535.129.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  545.23.08  Release Build\nGCC 12.3.0", "545.23.08"),
        ("something else\n", ""),
    ]:
        (tmp_path / "driver/nvidia/version").write_text(text)
        assert gpus.kernel_module_version(tmp_path) == version, text
    assert gpus.kernel_module_version(tmp_path / "nowhere") == ""


# nvidia-smi

GOOD_ROW = "0, GPU-aaaa, NVIDIA H100 80GB HBM3, 550.54.15, 0, [N/A], No, No"
FROM_GOOD_ROW = GpuReading(0, "GPU-aaaa", "NVIDIA H100 80GB HBM3", 0, None, False, False)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DriverReading]:
    """Returns the reading of a script in the place of nvidia-smi."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program = tmp_path / "nvidia-smi"

    def read(script: str, timeout_s: float = 5.0) -> DriverReading:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        reading = read_nvidia_smi(timeout_s)
        assert reading is not None
        return reading

    return read


def test_readings_of_nvidia_smi(smi: Callable[..., DriverReading]) -> None:
    second = GpuReading(1, "GPU-bbbb", "H100", 2, True, True, None, error="Unknown Error")
    mismatch = "Failed to initialize NVML: Driver/library version mismatch"
    for script, expected in [
        (f"echo '{GOOD_ROW}'", DriverReading("nvidia-smi", "550.54.15", "", (FROM_GOOD_ROW,))),
        (
            f"echo '{GOOD_ROW}'; echo '1, GPU-bbbb, H100, 550.54.15, 2, Yes, Yes, [Unknown Error]'",
            DriverReading("nvidia-smi", "550.54.15", "", (FROM_GOOD_ROW, second)),
        ),
        ("echo 'No devices were found'; exit 6", DriverReading("nvidia-smi")),
        (f"echo '{mismatch}'; exit 18", DriverReading("nvidia-smi", error=mismatch)),
        ("exit 9", DriverReading("nvidia-smi", error="exit code 9")),
        ("true", DriverReading("nvidia-smi", error="it names no GPU")),
    ]:
        assert smi(script) == expected, script


def test_an_older_nvidia_smi_is_asked_for_less(smi: Callable[..., DriverReading]) -> None:
    reading = smi(
        """
        says() { echo "Field \\"$1\\" is not a valid field to query."; exit 2; }
        case "$*" in
            *remapped_rows.pending*) says remapped_rows.pending;;
            *remapped_rows.failure*) says remapped_rows.failure;;
            *) echo '0, GPU-aaaa, V100, 418.226.00, 0, Yes';;
        esac
        """
    )
    assert reading == DriverReading(
        "nvidia-smi", "418.226.00", "", (GpuReading(0, "GPU-aaaa", "V100", 0, is_page_retirement_pending=True),)
    )


def test_lost_gpu_ends_the_list_with_a_message(smi: Callable[..., DriverReading]) -> None:
    lost = "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost."
    reading = smi(f"echo '{GOOD_ROW}'; echo '{lost}'; exit 15")
    assert (reading.error, len(reading.gpus)) == (lost, 1)
    assert judged(reading)[0].outcome is CheckOutcome.FAILED


def test_nvidia_smi_that_hangs_or_is_not_there(
    smi: Callable[..., DriverReading], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no answer from nvidia-smi within 0.2 s" in smi("exec /bin/sleep 60", 0.2).error
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert read_nvidia_smi(5.0) is None


# NVML

FAKE_NVML = """
class NVMLError(Exception):
    def __init__(self, value):
        self.value = value
    def __str__(self):
        return {3: "Not Supported", 12: "Not Found", 15: "GPU is lost", 18: "RM version mismatch"}[self.value]

NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_GPU_IS_LOST = 3, 12, 15
NVML_ERROR_RESET_REQUIRED, NVML_ERROR_UNKNOWN = 16, 999
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
fail = {}  # function name -> error number, or (gpu, number)
action = 0

def _maybe(name, gpu=None):
    found = fail.get(name)
    if isinstance(found, tuple):
        found = found[1] if found[0] == gpu else None
    if found:
        raise NVMLError(found)

def nvmlInit(): _maybe("init")
def nvmlShutdown(): pass
def nvmlSystemGetDriverVersion(): return b"550.54.15"
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index):
    _maybe("handle", index)
    return index
def nvmlDeviceGetUUID(gpu): return "GPU-%d" % gpu
def nvmlDeviceGetName(gpu): return b"H100"
def nvmlDeviceGetRemappedRows(gpu):
    _maybe("rows", gpu)
    return (0, 1, 1 if gpu == 1 else 0, 0)
def nvmlDeviceGetRetiredPagesPendingStatus(gpu): raise NVMLError(3)
def nvmlDeviceGetTotalEccErrors(gpu, kind, counter):
    if (kind, counter) != (1, 0):
        raise NVMLError(3)
    _maybe("ecc", gpu)
    return 0
class _Value: pass
def nvmlDeviceGetFieldValues(gpu, fields):
    assert fields == [230]
    answer, answer.value = _Value(), _Value()
    answer.nvmlReturn, answer.valueType, answer.value.uiVal = 0, 1, action
    return [answer]
"""


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("pynvml")
    exec(FAKE_NVML, module.__dict__)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_readings_of_nvml(nvml: ModuleType) -> None:
    first = GpuReading(0, "GPU-0", "H100", 0, None, False, False, corrected_rows=0, uncorrected_rows=1)
    second = replace(first, index=1, uuid="GPU-1", is_row_remap_pending=True)
    assert read_nvml() == DriverReading("nvml", "550.54.15", "", (first, second))


def test_nvml_names_the_recovery_that_the_driver_asks_for(nvml: ModuleType) -> None:
    nvml.action = 2
    reading = read_nvml()
    assert reading is not None
    assert reading.gpus[0].recovery_action == "reboot of the host"
    nvml.action = 99
    reading = read_nvml()
    assert reading is not None
    assert reading.gpus[0].recovery_action == "recovery action 99"


def test_gpu_that_nvml_lost_has_its_error(nvml: ModuleType) -> None:
    for where in ("handle", "rows", "ecc"):
        nvml.fail = {where: (1, 15)}
        reading = read_nvml()
        assert reading is not None, where
        assert [gpu.error for gpu in reading.gpus] == ["", "GPU is lost"], where


def test_nvml_that_cannot_start_has_its_error_or_none(nvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.fail["init"] = 18
    assert read_nvml() == DriverReading("nvml", error="RM version mismatch")
    nvml.fail["init"] = 12
    assert read_nvml() is None  # nvidia-smi may have more information
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert read_nvml() is None


# the check with its probe


def test_the_probe_asks_nvml_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(FAKE_NVML)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    findings = gpus.check_gpus(health_context(tmp_path, environment={"PYTHONPATH": path}), HealthHistory())
    assert [finding.outcome for finding in findings] == ["passed", "passed", "failed"]
    assert "GPU 1 (GPU-1): the remapping" in findings[2].detail


def test_driver_that_crashes_its_probe_fails(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("import os\nos.abort()\n")
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    findings = gpus.check_gpus(health_context(tmp_path, device="cuda", environment=environment), HealthHistory())
    assert [finding.outcome for finding in findings] == ["failed", "failed", "skipped"]
    assert "SIGABRT" in findings[0].detail


def test_cpu_runs_ask_no_gpu_driver(tmp_path: Path) -> None:
    def never(*arguments, **more):
        raise AssertionError("asked")

    findings = gpus.check_gpus(health_context(tmp_path, device="cpu", probe=never), HealthHistory())
    assert {finding.outcome for finding in findings} == {CheckOutcome.SKIPPED}


def test_probe_output_that_is_no_json_fails(tmp_path: Path) -> None:
    def probe(*arguments, **more):
        return SimpleNamespace(is_complete=True, output="what?", problem="")

    findings = gpus.check_gpus(health_context(tmp_path, device="cuda", probe=probe), HealthHistory())
    assert findings[0].outcome is CheckOutcome.FAILED
    assert "not JSON" in findings[0].detail


# the kernel's log


def record(number: int, at_s: float, text: str = "pid=1234, name=python") -> bytes:
    return f"4,100,{int(at_s * 1e6)},-;NVRM: Xid (PCI:0000:3b:00): {number}, {text}".encode()


def test_outcome_of_xid_messages() -> None:
    for lines, outcome, detail in [
        ([b"6,1,100,-;usb 1-1: new device", b"no record"], "passed", "no hardware error"),
        ([record(79, 9000.0)], "failed", "Xid 79 of GPU PCI:0000:3b:00 1000 s ago"),
        ([record(79, 1000.0)], "passed", ""),
        ([record(79, 13000.0)], "failed", "Xid 79 of GPU PCI:0000:3b:00 0 s ago"),
        ([record(79, 14000.0)], "passed", ""),
        ([record(31, 9999.0), record(45, 9999.0)], "passed", ""),
        ([record(94, 9999.0)], "warning", "1 error that the GPU driver handled"),
        ([record(48, 9990.0), record(95, 9995.0), record(31, 9999.0)], "failed", "2 hardware errors"),
    ]:
        finding = kernel_log.judge_kernel_log(lines, now_s=10000.0)
        assert finding.outcome == outcome, (lines, outcome, detail)
        assert detail in finding.detail, (lines, outcome, detail)


def test_kernel_log_is_skipped_unless_it_can_be_read(tmp_path: Path) -> None:
    one = health_context(tmp_path)
    (finding,) = kernel_log.check_kernel_log(one, HealthHistory())
    assert finding.outcome is CheckOutcome.SKIPPED
    (tmp_path / "kmsg").write_bytes(record(79, time.clock_gettime(time.CLOCK_MONOTONIC)))
    (finding,) = kernel_log.check_kernel_log(one, HealthHistory())
    assert finding.outcome is CheckOutcome.FAILED


def test_checks_of_a_host_read_the_log_that_its_launch_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "copy").write_bytes(record(79, time.clock_gettime(time.CLOCK_MONOTONIC)))
    settings = ExecutorSettings(
        config=make_config(job={"run_directory": str(tmp_path)}, runtime={"device": "cuda"}),
        etcd=EtcdSettings.of("127.0.0.1:1"), host="a", address="127.0.0.1", num_workers=1, min_hosts=1, max_hosts=1,
        feasible_hosts={1: 1}, places=Places(kernel_log=tmp_path / "copy"),
    )  # fmt: skip
    of_the_log = Check(kernel_log.NAMES, kernel_log.check_kernel_log, kernel_log.DEADLINE_S)
    monkeypatch.setattr(host_checks, "run_checks", lambda context: run_checks(context, [of_the_log]))
    without_etcd = cast("Any", None)
    report = host_checks.HostChecks(settings, without_etcd, JobKeys("demo")).check("session", is_training=False)
    assert [result.name for result in report.failed] == ["kernel-log"]
