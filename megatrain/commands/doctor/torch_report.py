"""Python, numpy and torch: the parts without which nothing trains."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megatrain.commands.doctor.finding import Finding, Level
from megatrain.contracts.exit_codes import exit_text

MINIMUM_PYTHON = (3, 11)
MINIMUM_TORCH = (2, 11)
GIB = 1 << 30

# Importing torch from a cold network disk takes tens of seconds; a broken driver can hang for ever.
PROBE_TIMEOUT_S = 120


def torch_findings(python_version: Sequence[Any]) -> list[Finding]:
    """Return the findings about Python, numpy and torch on this machine."""
    return [python_finding(python_version), numpy_finding(), *describe_torch(*probe_torch())]


def python_finding(version: Sequence[Any]) -> Finding:
    """Return whether this Python is recent enough."""
    state = f"{version[0]}.{version[1]}.{version[2]} ({sys.executable})"
    if (version[0], version[1]) < MINIMUM_PYTHON:
        return Finding("python", state, "megatrain needs Python 3.11 or later", Level.FATAL)
    return Finding("python", state)


def numpy_finding() -> Finding:
    """Return whether numpy is installed."""
    try:
        return Finding("numpy", importlib.metadata.version("numpy"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("numpy", "not installed", "the data reader needs it: pip install numpy", Level.FATAL)


def probe_torch() -> tuple[Mapping[str, Any] | None, str]:
    """Ask torch about itself in another process. Return (report, "") or (None, why there is none)."""
    if importlib.util.find_spec("torch") is None:
        return None, "not installed"
    command = [sys.executable, "-m", "megatrain.commands.doctor.torch_probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None, f"installed, but it did not answer within {PROBE_TIMEOUT_S} s"
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return None, f"installed, but importing it failed {exit_text(done.returncode)}: {last_line}"
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report, ""


def describe_torch(report: Mapping[str, Any] | None, problem: str) -> list[Finding]:
    """Turn the probe's answer into findings."""
    if report is None:
        return [Finding("torch", problem, "nothing trains without it: pip install 'torch>=2.11'", Level.FATAL)]
    return [_version_finding(report), _gpu_finding(report), _kernels_finding(report), *_backend_findings(report)]


def _version_finding(report: Mapping[str, Any]) -> Finding:
    build = f"built for CUDA {report['cuda_build']}" if report["cuda_build"] else "built for CPU"
    state = f"{report['version']}, {build}"
    found = re.match(r"(\d+)\.(\d+)", report["version"])
    if found is None or (int(found[1]), int(found[2])) < MINIMUM_TORCH:
        return Finding("torch", state, "megatrain needs torch 2.11 or later", Level.FATAL)
    return Finding("torch", state)


def _gpu_finding(report: Mapping[str, Any]) -> Finding:
    if report["is_cuda_available"]:
        devices = [
            f"{device['name']} (capability {device['capability']}, {device['memory_bytes'] / GIB:.0f} GiB)"
            for device in report["devices"]
        ]
        return Finding("gpu", f"{len(devices)}: {', '.join(devices)}", 'device = "auto" trains on GPU')
    on_cpu = "training runs on CPU with gloo, every operation in its PyTorch reference form"
    if report["cuda_build"]:
        return Finding("gpu", "torch sees none, although it is built for CUDA", on_cpu, Level.WARNING)
    return Finding("gpu", "none that torch can use", on_cpu, Level.ABSENT)


def _kernels_finding(report: Mapping[str, Any]) -> Finding:
    """Return whether the compiled kernels are active, and why not."""
    plain = "every operation has its plain PyTorch form"
    level = Level.WARNING if report["is_cuda_available"] else Level.ABSENT
    if report["kernels"]["reason"]:
        if not report["is_cuda_available"]:
            return Finding("cuda kernels", report["kernels"]["reason"], f"not needed without a GPU: {plain}", level)
        rebuild = (
            "with nvcc on this machine: MEGATRAIN_CUDA=1 pip install --no-build-isolation --no-deps --no-cache-dir "
            "--force-reinstall megatrain"
        )
        return Finding("cuda kernels", report["kernels"]["reason"], f"{plain}, which is slower; {rebuild}", level)
    state = f"compiled for compute capability {', '.join(report['kernels']['architectures'])}"
    unfit = next((device["missing_capability"] for device in report["devices"] if device["missing_capability"]), "")
    return Finding("cuda kernels", state, unfit, level if unfit else Level.OK)


def _backend_findings(report: Mapping[str, Any]) -> list[Finding]:
    findings = []
    if report["has_gloo"]:
        findings.append(Finding("gloo", "in torch"))
    else:
        consequence = "ranks on CPU cannot talk to each other"
        level = Level.WARNING if report["has_nccl"] else Level.FATAL
        findings.append(Finding("gloo", "not in this torch", consequence, level))
    if report["has_nccl"]:
        findings.append(Finding("nccl", report["nccl_version"] or "in torch"))
    elif report["is_cuda_available"]:
        findings.append(Finding("nccl", "not in this torch", "more than one GPU cannot be used", Level.WARNING))
    else:
        findings.append(Finding("nccl", "not in this torch", "not needed without a GPU", Level.ABSENT))
    return findings
