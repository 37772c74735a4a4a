"""Findings about Python, numpy and torch, which training always needs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from megatrain.commands.doctor.finding import NOT_COMPILED, DoctorFinding, FindingLevel
from megatrain.commands.doctor.probe import run_probe
from megatrain.formatting import names_text

MINIMUM_PYTHON = (3, 11)
MINIMUM_TORCH = (2, 11)
GIB = 1 << 30

REPORT_MARK = "torch-report "
"""Begins the line that the probe prints."""


class HostKernel(StrEnum):
    """The kernels of csrc/host_kernels."""

    STEP = "AdamW and LAMB"
    ROTATION = "rotation"
    RMS_NORM = "RMSNorm"
    SWIGLU_GRADIENT = "SwiGLU's gradient"
    GRADIENT_NORM = "the gradient norm"


NO_FUSED_INSTRUCTIONS = "this processor has no fused multiply-add instructions (FMA)"
SAME_BITS = (HostKernel.STEP, HostKernel.ROTATION)
"""The kernels whose results equal those of torch's operations bit by bit."""


def torch_findings(python_version: Sequence[Any]) -> list[DoctorFinding]:
    """Return the findings about Python, numpy and torch on this machine."""
    return [python_finding(python_version), numpy_finding(), *describe_torch(*probe_torch())]


def python_finding(version: Sequence[Any]) -> DoctorFinding:
    """Return whether this Python is recent enough."""
    state = f"{version[0]}.{version[1]}.{version[2]} ({sys.executable})"
    if (version[0], version[1]) < MINIMUM_PYTHON:
        return DoctorFinding("python", state, "megatrain needs Python 3.11 or later", FindingLevel.FATAL)
    return DoctorFinding("python", state)


def numpy_finding() -> DoctorFinding:
    """Return whether numpy is installed."""
    try:
        return DoctorFinding("numpy", importlib.metadata.version("numpy"))
    except importlib.metadata.PackageNotFoundError:
        return DoctorFinding(
            "numpy", "not installed", "the data reader needs it: pip install numpy", FindingLevel.FATAL
        )


def probe_torch() -> tuple[Mapping[str, Any] | None, str]:
    """Run the probe in another process. Return (report, ""), or (None, why there is no report)."""
    if importlib.util.find_spec("torch") is None:
        return None, "not installed"
    return run_probe("megatrain.commands.doctor.torch_probe", REPORT_MARK)


def describe_torch(report: Mapping[str, Any] | None, problem: str) -> list[DoctorFinding]:
    """Return the findings that follow from the probe's report, or from the problem if there is no report."""
    if report is None:
        return [DoctorFinding("torch", problem, "training needs it: pip install 'torch>=2.11'", FindingLevel.FATAL)]
    return [
        *(_version_finding(report), _gpu_finding(report), _kernels_finding(report), _host_kernels_finding(report)),
        *_backend_findings(report),
    ]


def _version_finding(report: Mapping[str, Any]) -> DoctorFinding:
    build = f"built for CUDA {report['cuda_build']}" if report["cuda_build"] else "built for CPU"
    state = f"{report['version']}, {build}"
    found = re.match(r"(\d+)\.(\d+)", report["version"])
    if found is None or (int(found[1]), int(found[2])) < MINIMUM_TORCH:
        return DoctorFinding("torch", state, "megatrain needs torch 2.11 or later", FindingLevel.FATAL)
    return DoctorFinding("torch", state)


def _gpu_finding(report: Mapping[str, Any]) -> DoctorFinding:
    if report["is_cuda_available"]:
        devices = [
            f"{device['name']} (capability {device['capability']}, {device['memory_bytes'] / GIB:.0f} GiB)"
            for device in report["devices"]
        ]
        return DoctorFinding("gpu", f"{len(devices)}: {', '.join(devices)}", 'device = "auto" trains on GPU')
    on_cpu = "training runs on CPU with gloo"
    if report["cuda_build"]:
        return DoctorFinding("gpu", "torch finds none, although it is built for CUDA", on_cpu, FindingLevel.WARNING)
    return DoctorFinding("gpu", "none that torch can use", on_cpu, FindingLevel.ABSENT)


def _kernels_finding(report: Mapping[str, Any]) -> DoctorFinding:
    """Return whether the CUDA kernels are compiled for this machine's GPUs; if not, why, and the consequence."""
    plain = "every operation runs in its plain PyTorch form"
    level = FindingLevel.WARNING if report["is_cuda_available"] else FindingLevel.ABSENT
    if report["kernels"]["reason"]:
        if not report["is_cuda_available"]:
            return DoctorFinding("cuda kernels", report["kernels"]["reason"], "not needed without a GPU", level)
        rebuild = (
            "with nvcc on this machine: MEGATRAIN_CUDA=1 pip install --no-build-isolation --no-deps --no-cache-dir "
            "--force-reinstall megatrain"
        )
        return DoctorFinding("cuda kernels", report["kernels"]["reason"], f"{plain}, which is slower; {rebuild}", level)
    state = f"compiled for compute capability {', '.join(report['kernels']['architectures'])}"
    unfit = next((device["missing_capability"] for device in report["devices"] if device["missing_capability"]), "")
    return DoctorFinding("cuda kernels", state, unfit, level if unfit else FindingLevel.OK)


def _host_kernels_finding(report: Mapping[str, Any]) -> DoctorFinding:
    """Return which kernels of csrc/host_kernels are used; if not all are, why, and the consequence."""
    found = report["host_kernels"]
    missing, unlike_torch, slow_here = found["missing"], found["unlike_torch"], found["slow_here"]
    unused = [name for name in HostKernel if name in (*missing, *unlike_torch, *slow_here)]
    if not unused:
        return DoctorFinding("host kernels", "compiled, all used")
    changed = [name for name in unused if name not in SAME_BITS]
    results = f"; the last bits of {names_text(changed)} in fp32 differ" if changed else ", with the same results"
    consequence = f"on CPUs, more time for {names_text(unused)}{results}; GPUs do not use them"
    if not found["is_built"]:
        return DoctorFinding("host kernels", NOT_COMPILED, consequence, FindingLevel.ABSENT)
    if not missing:
        reasons = {"this torch rounds in another way": unlike_torch, NO_FUSED_INSTRUCTIONS: slow_here}
        not_used = [f"not used for {names_text(names)}: {reason}" for reason, names in reasons.items() if names]
        return DoctorFinding("host kernels", f"compiled, but {'; '.join(not_used)}", consequence, FindingLevel.ABSENT)
    rebuild = "in megatrain's sources: MEGATRAIN_CUDA=0 python setup.py build_ext --inplace --force"
    state = f"compiled, but of another version or for another machine, without {names_text(missing)}: build it again"
    if len(missing) == len(HostKernel):
        state = "compiled, but none is used: of another version or for another machine; build it again"
    return DoctorFinding("host kernels", state, f"{consequence}; {rebuild}", FindingLevel.WARNING)


def _backend_findings(report: Mapping[str, Any]) -> list[DoctorFinding]:
    findings = []
    if report["has_gloo"]:
        findings.append(DoctorFinding("gloo", "in torch"))
    else:
        consequence = "ranks on CPU cannot communicate"
        level = FindingLevel.WARNING if report["has_nccl"] else FindingLevel.FATAL
        findings.append(DoctorFinding("gloo", "not in this torch", consequence, level))
    if report["has_nccl"]:
        findings.append(DoctorFinding("nccl", report["nccl_version"] or "in torch"))
    elif report["is_cuda_available"]:
        findings.append(
            DoctorFinding("nccl", "not in this torch", "more than one GPU cannot be used", FindingLevel.WARNING)
        )
    else:
        findings.append(DoctorFinding("nccl", "not in this torch", "not needed without a GPU", FindingLevel.ABSENT))
    return findings
