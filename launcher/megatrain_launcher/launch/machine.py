"""Counts the GPUs (by the NVIDIA driver's device files) and cores that this machine has for workers. Loads no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from megatrain.contracts.errors import ConfigError
from megatrain.formatting import count_text

_GPU_FILE = re.compile(r"nvidia\d+")
_MODEL = re.compile(r"^Model:\s*(.+?)\s*$", re.MULTILINE)


def num_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return the number of GPUs that workers started with this environment can see."""
    try:
        present = sum(1 for name in os.listdir(devices) if _GPU_FILE.fullmatch(name))
    except OSError:
        present = 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    # CUDA uses the devices before the first -1
    count = 0
    for name in (part.strip() for part in visible.split(",")):
        if name in ("", "-1"):
            break
        count += 1
    return min(count, present)


def num_workers(text: str, device: str, environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return the number of workers that --nproc-per-node means here; `device` is runtime.device.

    Raises: ConfigError when `text` is none of the accepted values, or is "gpu" and no GPU can be used.
    """
    if text.isascii() and text.isdigit() and 0 < int(text) <= 1024:
        return int(text)
    gpus = 0 if device == "cpu" else num_gpus(environment, devices)
    if text == "cpu" or (text == "auto" and gpus == 0):
        return len(os.sched_getaffinity(0))
    if text in ("gpu", "auto"):
        if gpus == 0:
            why = 'runtime.device is "cpu"' if device == "cpu" else "this host has none that workers can see"
            raise ConfigError([f"--nproc-per-node=gpu: no GPU: {why}; use a number, cpu or auto"])
        return gpus
    raise ConfigError([f"--nproc-per-node={text}: expected a number from 1 to 1024, auto, gpu or cpu"])


def hardware_text(environment: Mapping[str, str], proc: Path = Path("/proc"), devices: Path = Path("/dev")) -> str:
    """Return the hardware as text, for example "8 x NVIDIA H100 80GB HBM3, 96 cores"."""
    gpus, cores = num_gpus(environment, devices), len(os.sched_getaffinity(0))
    parts = [count_text(cores, "core")]
    if gpus:
        models = set()
        for path in sorted((proc / "driver/nvidia/gpus").glob("*/information")):
            try:
                models.update(_MODEL.findall(path.read_text(errors="replace")))
            except OSError:
                continue
        parts.insert(0, f"{gpus} x {' or '.join(sorted(models)) or 'GPU'}")
    return ", ".join(parts)
