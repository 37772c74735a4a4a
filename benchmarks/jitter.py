"""The jitter of step times: the 99th percentile of 500 steps and the median, with planned and with Python's own garbage
collection.

Two data-parallel ranks train the demo's model with the real command. Each waits for the other in every step, so a pause
of one is a pause of both. A step lasts until the next one begins, so work between steps, such as a planned collection,
counts. The sides take turns, run by run.
Run alone on the machine: python -m benchmarks jitter [--write]
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bars import at_most
from benchmarks.result import Result
from benchmarks.throughput_ranks import train_records, write_random_tokens

STEPS, LEFT_OUT = 270, 20
ROUNDS = 2
RATIO_BAR = 1.1
"""The bar for planned p99 / p50 divided by that with Python's own collections: planned ones make no step longer."""
LAYOUT = ["--parallel.tp_size=1", "--parallel.pp_size=1", "--parallel.dp_size=2", "--parallel.num_chunks=1",
          "--parallel.schedule=1f1b", "--batch.micro_batch_size=4", "--batch.global_batch_size=8",
          "--log.interval=1"]  # fmt: skip
SIDES = {"planned, every 20 steps": "--train.gc_interval=20", "whenever Python decides": "--train.gc_interval=0"}
"""Planned collections are frequent enough that the slowest 1 % of steps are steps with a collection."""


def run() -> Result:
    """Train in the order planned, Python's, Python's, planned."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as directory:
        prefix = Path(directory) / "train"
        write_random_tokens(prefix)
        for turn in range(ROUNDS):
            for side in list(SIDES)[:: 1 if turn % 2 == 0 else -1]:
                run_directory = Path(directory) / f"run-{turn}-{list(SIDES).index(side)}"
                records = train_records(run_directory, prefix, 2, STEPS, [*LAYOUT, SIDES[side]])
                seconds[side] += [record["wall_s"] for record in records if record["kind"] == "interval"][LEFT_OUT:]
    found = {side: figures(values) for side, values in seconds.items()}
    planned, unplanned = (one["p99 / p50"] for one in found.values())
    return Result(
        name="jitter",
        title=f"Step times of {ROUNDS * (STEPS - LEFT_OUT)} steps, with planned and Python's own garbage collection",
        command="python -m benchmarks jitter --write",
        rows=[{"garbage collection": side, **one} for side, one in found.items()],
        notes=[
            f"{ROUNDS} runs a side, in turn, of {STEPS - LEFT_OUT} steps each after {LEFT_OUT} that are not counted",
            "time from one step line of rank 0 to the next: data, report, black box and collections included",
            "2 gloo ranks of one thread on one machine",
        ],
        settings={"configuration": "configs/demo.toml", "layout": "dp2", "global_batch_size": 8},
        bars=[at_most("p99 / p50 as planned / Python's own", planned / unplanned, RATIO_BAR)],
    )


def figures(seconds: Sequence[float]) -> dict[str, float | int]:
    """Return the row of one side."""
    percentiles = statistics.quantiles(seconds, n=100, method="inclusive")
    median = statistics.median(seconds)
    return {
        "steps": len(seconds),
        "p50 ms": median * 1e3,
        "p99 ms": percentiles[98] * 1e3,
        "p99 / p50": percentiles[98] / median,
        "longest ms": max(seconds) * 1e3,
    }
