"""A program that runs this host's side of the timed all-reduce with one partner, and prints JSON lines per rank."""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from typing import Any

from megatrain.contracts.records.record import decode
from megatrain_launcher.health.child import guard_probe
from megatrain_launcher.health.forked import print_measurement, run_part
from megatrain_launcher.health.pair_test import PairTask

COMPUTE_S = 30.0
"""Time in addition to the all-reduce's time limit: for a rank's own computation, and to report a timeout."""


def main(task: PairTask) -> None:
    """Measure with one rank per device that workers use; on the CPU, with one rank."""
    guard_probe()
    from megatrain_launcher.health.compute import resolve_device

    try:
        device_type, num_devices = resolve_device(task.device)
    except RuntimeError as error:
        print_measurement(part="pair", error=str(error))
        sys.exit(1)
    num_ranks = min(task.num_workers, num_devices)
    ranks = [partial(_measure, task, device_type, num_ranks, number) for number in range(num_ranks)]
    run_part("pair", ranks, task.timeout_s + COMPUTE_S)


def _measure(task: PairTask, device_type: str, num_ranks: int, number: int) -> dict[str, Any]:
    from torch import distributed as dist

    from megatrain_launcher.health.compute import measure_matmul
    from megatrain_launcher.health.reduce import measure_all_reduce

    def make_store() -> Any:
        store = dist.TCPStore(
            task.store_address, task.store_port, is_master=False, timeout=timedelta(seconds=task.timeout_s)
        )
        return dist.PrefixStore(task.prefix, store)

    # measured and printed before the all-reduce, so that it is known even if the partner never connects
    compute_s = measure_matmul(device_type, number)
    print_measurement(part="pair", number=number, device_type=device_type, compute_s=compute_s)
    rank = task.side * num_ranks + number
    return measure_all_reduce(device_type, number, rank, 2 * num_ranks, make_store, task.timeout_s)


if __name__ == "__main__":
    main(decode(PairTask, sys.argv[1], "the pair task"))
