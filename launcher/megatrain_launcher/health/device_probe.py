"""A program that times each device of this host, then an all-reduce among them; CPU ranks use the loopback interface.

Prints each measurement at once as a line of JSON, so that it is not lost if a later part hangs.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from megatrain_launcher.health.child import guard_probe
from megatrain_launcher.health.forked import print_measurement, run_part

_CPU_RANKS = 2


def main(wanted: str, num_workers: int, part_s: float) -> None:
    """Measure and print. Exits with 1 if torch sees no device of the wanted kind."""
    guard_probe()
    from megatrain_launcher.health.compute import hardware_name, measure_compute, resolve_device

    try:
        device_type, num_devices = resolve_device(wanted)
    except RuntimeError as error:
        print_measurement(part="device", error=str(error))
        sys.exit(1)
    hardware = hardware_name(device_type)
    print_measurement(part="device", device_type=device_type, num_devices=num_devices, hardware=hardware)
    num_used = min(num_workers, num_devices)
    run_part("compute", [partial(measure_compute, device_type, index) for index in range(num_used)], part_s)
    num_ranks = num_used if device_type == "cuda" else _CPU_RANKS
    with tempfile.TemporaryDirectory(prefix="megatrain-loopback-") as directory:
        ranks = [partial(_loopback, device_type, rank, num_ranks, Path(directory), part_s) for rank in range(num_ranks)]
        run_part("loopback", ranks, part_s)


def _loopback(device_type: str, rank: int, num_ranks: int, directory: Path, part_s: float) -> dict[str, Any]:
    from torch import distributed as dist

    from megatrain_launcher.health.reduce import measure_all_reduce

    def make_store() -> Any:
        return dist.FileStore(str(directory / "store"), num_ranks)

    return measure_all_reduce(device_type, rank, rank, num_ranks, make_store, part_s)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
