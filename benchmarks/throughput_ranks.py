"""Tokens a second of 8 processes, tp2 pp2 dp2 with 2 chunks a stage, through the real command under torchrun.

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
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bars import at_least
from benchmarks.result import Result
from megatrain.data.indexed import IndexedWriter, token_dtype

ROOT = Path(__file__).parent.parent
STEPS, WARMUP = 40, 10
EIGHT_BAR = 0.8
"""Tokens/s of 8 processes by those of one, which share the cores."""
VOCAB_SIZE = 4096
LAYOUTS = {
    "1 process": (1, ["--parallel.tp_size=1", "--parallel.pp_size=1", "--parallel.dp_size=1", "--parallel.num_chunks=1",
                      "--parallel.schedule=1f1b"]),
    "tp2 pp2 dp2, 2 chunks": (8, []),
}  # fmt: skip


def run() -> Result:
    """Train the demo's model for some steps in each layout, on random tokens."""
    with tempfile.TemporaryDirectory() as directory:
        prefix = Path(directory) / "train"
        write_random_tokens(prefix)
        rows = [_measure(name, Path(directory), prefix) for name in LAYOUTS]
    return Result(
        name="throughput-ranks",
        title="Tokens/s of the demo's model, one process and 8 processes on one machine",
        command="python -m benchmarks throughput_ranks --write",
        rows=rows,
        notes=[
            f"median over steps {WARMUP + 1} to {STEPS}, one thread a process, gloo over loopback, fp32",
            "8 processes share the machine's cores: the figure says what the layout costs there, not how it scales",
        ],
        settings={"configuration": "configs/demo.toml", "steps": STEPS},
        beyond_bar=at_least("tokens/s of 8 processes / of one", rows[1]["tokens/s"] / rows[0]["tokens/s"], EIGHT_BAR),
    )


def _measure(name: str, directory: Path, prefix: Path) -> dict[str, Any]:
    num_processes, overrides = LAYOUTS[name]
    records = train_records(directory / f"run-{num_processes}", prefix, num_processes, STEPS, overrides)
    steps = [record for record in records if record["kind"] == "step"][WARMUP:]
    seconds = [record["duration_s"] for record in steps]
    deciles = statistics.quantiles(seconds, n=10)
    return {
        "layout": name,
        "tokens/s": statistics.median(record["num_tokens"] / record["duration_s"] for record in steps),
        "ms/step": statistics.median(seconds) * 1e3,
        "p10 ms": deciles[0] * 1e3,
        "p90 ms": deciles[-1] * 1e3,
        "peak RSS of rank 0, GiB": steps[-1]["memory_bytes"] / 2**30,
    }


def train_records(
    run_directory: Path, prefix: Path, num_processes: int, num_steps: int, overrides: Sequence[str]
) -> list[dict[str, Any]]:
    """Train the demo's model by the real command under torchrun. Return what it reported: metrics.jsonl."""
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
