"""Tokens a second of 8 processes, tp2 pp2 dp2 with 2 chunks a stage, with the real command under torchrun.

They are compared with concurrent jobs of one process each, one for each core. These fill the cores too but do not
communicate, so the ratio shows the cost of the layout on any machine.
Run alone on the machine: python -m benchmarks throughput_ranks [--write]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bars import at_least
from benchmarks.result import Result
from megatrain.data.indexed import token_dtype
from megatrain.data.indexed_writer import IndexedWriter

ROOT = Path(__file__).parent.parent
STEPS, WARMUP = 40, 10
NUM_CORES = len(os.sched_getaffinity(0))
EIGHT_BAR = 0.5
"""The bar for tokens/s of 8 processes, divided by those of single processes that fill the same cores."""
VOCAB_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Side:
    """Concurrent jobs of one kind."""

    name: str
    num_jobs: int
    num_processes: int
    overrides: Sequence[str] = ()


SINGLE = ("--parallel.tp_size=1", "--parallel.pp_size=1", "--parallel.dp_size=1", "--parallel.num_chunks=1",
          "--parallel.schedule=1f1b")  # fmt: skip
SIDES = (
    Side("1 process", 1, 1, SINGLE),
    Side(f"{NUM_CORES} jobs of 1 process", NUM_CORES, 1, SINGLE),
    Side("tp2 pp2 dp2, 2 chunks", 1, 8),
)


def run() -> Result:
    """Train the demo's model on random tokens for some steps in each layout."""
    with tempfile.TemporaryDirectory() as directory:
        prefix = Path(directory) / "train"
        write_random_tokens(prefix)
        rows = [_measure(side, Path(directory), prefix) for side in SIDES]
    return Result(
        name="throughput-ranks",
        title="Tokens/s of the demo's model, one process and 8 processes on one machine",
        command="python -m benchmarks throughput_ranks --write",
        rows=rows,
        notes=[
            f"median over steps {WARMUP + 1} to {STEPS}, one thread a process, gloo over loopback, fp32",
            "jobs side by side: the sum of their tokens/s, the median of all their steps",
            "8 processes share the machine's cores: the figure shows the cost of the layout there, not how it scales",
            "bar: 0.8 of ONE process on 23 November 2026, which leaves cores idle; on that day it became 0.5 of jobs",
            "that fill the cores; 0.3 for some hours of 24 November, for no reason; then 0.5 again",
        ],
        settings={"configuration": "configs/demo.toml", "steps": STEPS},
        bars=[
            at_least(
                f"tokens/s of 8 processes / of {NUM_CORES} jobs of one",
                rows[2]["tokens/s"] / rows[1]["tokens/s"],
                EIGHT_BAR,
            )
        ],
    )


def _measure(side: Side, directory: Path, prefix: Path) -> dict[str, Any]:
    def steps_of(job: int) -> list[dict[str, Any]]:
        run_directory = directory / f"{side.name}-{job}".replace(" ", "-")
        records = train_records(run_directory, prefix, side.num_processes, STEPS, side.overrides)
        return [record for record in records if record["kind"] == "step"][WARMUP:]

    with ThreadPoolExecutor(side.num_jobs) as jobs:
        by_job = list(jobs.map(steps_of, range(side.num_jobs)))
    seconds = [step["duration_s"] for steps in by_job for step in steps]
    deciles = statistics.quantiles(seconds, n=10)
    return {
        "layout": side.name,
        "tokens/s": sum(
            statistics.median(step["num_tokens"] / step["duration_s"] for step in steps) for steps in by_job
        ),
        "ms/step": statistics.median(seconds) * 1e3,
        "p10 ms": deciles[0] * 1e3,
        "p90 ms": deciles[-1] * 1e3,
        "peak RSS of rank 0, GiB": max(steps[-1]["memory_bytes"] for steps in by_job) / 2**30,
    }


def train_records(
    run_directory: Path, prefix: Path, num_processes: int, num_steps: int, overrides: Sequence[str]
) -> list[dict[str, Any]]:
    """Train the demo's model with the real command under torchrun. Return the records of metrics.jsonl."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}",
        "-m", "megatrain.train", str(ROOT / "configs" / "demo.toml"), f"--train.steps={num_steps}",
        f"--job.run_directory={run_directory}", f"--data.train={prefix}", "--data.validation=", "--data.tokenizer=",
        "--checkpoint.interval_s=0", "--checkpoint.save_at_end=false", "--optimizer.lr_warmup_steps=0", *overrides,
    ]  # fmt: skip
    subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", **os.environ}, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (run_directory / "metrics" / "metrics.jsonl").read_text().splitlines()]


def write_random_tokens(prefix: Path) -> None:
    """Write the data that the steps read."""
    with IndexedWriter(prefix, token_dtype(VOCAB_SIZE)) as writer:
        writer.add_document(np.random.default_rng(0).integers(0, VOCAB_SIZE, 400_000))
