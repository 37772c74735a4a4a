"""How even steps are: the slowest of 500 beside the median, with garbage collected as planned and as Python likes.

Two data-parallel ranks train the demo's model by the real command; each waits for the other in every step, so that a
pause of either is a pause of both. A step lasts until the next one: what is between steps, as a planned collection,
counts. The sides take turns, run by run. Run alone on the machine: python -m benchmarks jitter [--write]
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
"""Of p99 / p50 as planned by Python's own: planned collections make no step longer."""
LAYOUT = ["--parallel.tp_size=1", "--parallel.pp_size=1", "--parallel.dp_size=2", "--parallel.num_chunks=1",
          "--parallel.schedule=1f1b", "--batch.micro_batch_size=4", "--batch.global_batch_size=8",
          "--log.interval=1"]  # fmt: skip
SIDES = {"planned, every 20 steps": "--train.gc_interval=20", "whenever Python decides": "--train.gc_interval=0"}
"""Often enough that the 99th of 100 steps is one in which garbage is collected."""


def run() -> Result:
    """Train by turns: planned, Python's, Python's, planned."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as directory:
        prefix = Path(directory) / "train"
        write_random_tokens(prefix)
        for turn in range(ROUNDS):
            for side in list(SIDES)[:: 1 if turn % 2 == 0 else -1]:
                run_directory = Path(directory) / f"run-{turn}-{list(SIDES).index(side)}"
                records = train_records(run_directory, prefix, 2, STEPS, [*LAYOUT, SIDES[side]])
                seconds[side] += [one["wall_s"] for one in records if one["kind"] == "interval"][LEFT_OUT:]
    found = {side: figures(values) for side, values in seconds.items()}
    planned, unplanned = (one["p99 / p50"] for one in found.values())
    return Result(
        name="jitter",
        title=f"Step times of {ROUNDS * (STEPS - LEFT_OUT)} steps, with planned and Python's own garbage collection",
        command="python -m benchmarks jitter --write",
        rows=[{"garbage collection": side, **one} for side, one in found.items()],
        notes=[
            f"{ROUNDS} runs a side of {STEPS - LEFT_OUT} steps each after {LEFT_OUT} that are left out, taking turns",
            "from one step line to the next, as rank 0 saw it: data, report, black box and collections included",
            "2 gloo ranks of one thread on one machine",
        ],
        settings={"configuration": "configs/demo.toml", "layout": "dp2", "global_batch_size": 8},
        beyond_bar=at_most("p99 / p50 as planned, by Python's own", planned / unplanned, RATIO_BAR),
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
