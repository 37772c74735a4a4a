"""A program that queries the driver about the GPUs and prints a DriverReading.

It is a separate program because a call into a broken driver may never return, and the process may not be killable.
"""

from __future__ import annotations

import sys

from megatrain.contracts.records.record import encode
from megatrain_job.devices.gpu_readings import DriverReading
from megatrain_job.devices.nvml import read_nvml
from megatrain_launcher.health.child import guard_probe
from megatrain_launcher.health.nvidia_smi import read_nvidia_smi


def main(deadline_s: float) -> None:
    """Print the reading of NVML, or of nvidia-smi if NVML's Python binding or library is missing."""
    guard_probe()
    reading = read_nvml() or read_nvidia_smi(deadline_s) or DriverReading("")
    sys.stdout.write(encode(reading).decode() + "\n")


if __name__ == "__main__":
    main(float(sys.argv[1]))
