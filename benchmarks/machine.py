"""Facts about the machine that figures depend on."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

NUM_SQUARES = 1_000_000
NUM_TRIES = 5


def machine() -> dict[str, Any]:
    """Return facts about the machine that the figures depend on."""
    import torch

    facts: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": platform.system() + " " + platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(0)
        facts["cuda"] = torch.version.cuda
    return facts


def reference_ms() -> int:
    """Return how fast one core of the machine is now: the CPU milliseconds in which Python adds up a million squares.

    The least of five tries. Seconds that were measured on different days are compared with it.
    """
    tries_ns = []
    for _ in range(NUM_TRIES):
        begin_ns = time.process_time_ns()
        sum(number * number for number in range(NUM_SQUARES))
        tries_ns.append(time.process_time_ns() - begin_ns)
    return round(min(tries_ns) / 1e6)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
