"""What always-on telemetry costs a training step: switched on and off live, in blocks of 10 steps, paired.

The ranks are the real trainer; etcd, the daemon and the host's streamer run beside them and do what they do in a job.
The switch is the control page. Run alone on the machine: python -m benchmarks telemetry_overhead [--write]
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.result import Result
from benchmarks.telemetry_rank import is_on
from megatrain.config.config import Config
from megatrain.config.serialize import to_toml
from megatrain.contracts.process import HOST_VARIABLE
from megatrain.coordination.settings import EtcdSettings
from megatrain_diagnostics.launched import daemon_command, streamer_command
from megatrain_launcher.etcd_process import EtcdProcess, free_ports
from megatrain_launcher.executor.host_program import etcd_words
from tests.helpers.tiny_data import write_corpus

BLOCK = 10
WARMUP = 200
"""Steps left out at the beginning: a multiple of four blocks."""
STEPS = 4_000
HOST = "bench"
VOCAB_SIZE = 512
SHAPES = {
    "1 rank": (1, {"seq_len": 128, "hidden_size": 192, "num_layers": 4, "num_heads": 4}),
    "2 ranks, gloo": (2, {"seq_len": 128, "hidden_size": 192, "num_layers": 4, "num_heads": 4}),
}
NUM_MICROBATCHES = 4
BOUND = 1.004
_Z_95 = 1.645


def run(steps: int = STEPS, title: str = "") -> Result:
    """Measure one rank and two. `title`: only the case of this name."""
    rows = [_measure(name, *SHAPES[name], steps) for name in SHAPES if title in ("", name)]
    return Result(
        name="telemetry-overhead",
        title="What always-on telemetry costs a step",
        command="python -m benchmarks telemetry_overhead --write",
        rows=rows,
        notes=[
            (
                f"ratio: seconds of a step with telemetry by those without, from the medians of blocks of {BLOCK} "
                f"steps, paired with their neighbour, order on-off-off-on; first {WARMUP} steps left out; asked for: "
                f"upper bound of at most {BOUND}"
            ),
            "upper 95 %: one-sided, of the mean of the pairs' logarithms",
            (
                "on: all spans timed and on record, one step in 10 streamed in full, totals and values of all; off: no "
                "span is timed (span mask 0)"
            ),
            (
                "beside the ranks: etcd, the daemon with its store, the host's streamer; what of a core the streamer "
                "takes, at nice 10, is in the last column"
            ),
        ],
        settings={"micro_batches": NUM_MICROBATCHES, **SHAPES["1 rank"][1], "vocab_size": VOCAB_SIZE},
    )


def _measure(name: str, num_ranks: int, model: dict[str, int], steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="telemetry-overhead-") as directory:
        began_ns, streamer_s = _train(Path(directory), num_ranks, model, steps)
    seconds = [(later - earlier) / 1e9 for earlier, later in pairwise(began_ns)]
    ratios = pair_ratios(seconds, BLOCK, WARMUP)
    mean, upper = mean_and_upper(ratios)
    used = seconds[WARMUP:]
    off_s = [value for step, value in enumerate(seconds) if step >= WARMUP and not is_on(step, BLOCK)]
    return {
        "case": name,
        "steps": len(used),
        "step without, ms": statistics.median(off_s) * 1e3,
        "pairs": len(ratios),
        "ratio": round(mean, 5),
        "upper 95 %": round(upper, 5),
        "streamer, cores": round(streamer_s / sum(seconds), 4),
    }


def pair_ratios(seconds: Sequence[float], block: int, warmup: int) -> list[float]:
    """Return on / off of each pair of neighbouring blocks, by their medians."""
    ratios = []
    for first in range(warmup, len(seconds) - 2 * block + 1, 2 * block):
        one, other = (statistics.median(seconds[start : start + block]) for start in (first, first + block))
        ratios.append(one / other if is_on(first, block) else other / one)
    return ratios


def mean_and_upper(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the geometric mean, and its upper 95 % bound."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean + _Z_95 * error)


def _train(root: Path, num_ranks: int, model: dict[str, int], steps: int) -> tuple[list[int], float]:
    """Train; return when each step of rank 0 began, and the seconds of processor time that the streamer took."""
    config = _config(root, num_ranks, model, steps)
    file, times = root / "config.toml", root / "times.json"
    file.write_text(to_toml(config))
    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdProcess(root / "coordination"))
        with _diagnosis(root, config, etcd.settings) as streamer:
            words = [sys.executable, "-m", "benchmarks.telemetry_rank", str(times), str(BLOCK), str(file)]
            port, ranks = free_ports(1)[0], []
            for rank in range(num_ranks):
                environment = _environment(rank, num_ranks, port)
                ranks.append(subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL))
                stack.callback(ranks[-1].kill)  # after an interrupt; one that has ended is left alone
            codes = [rank.wait() for rank in ranks]
            streamer_s = _cpu_seconds(streamer)
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}")
    return json.loads(times.read_text()), streamer_s


@contextmanager
def _diagnosis(root: Path, config: Config, etcd: EtcdSettings) -> Iterator[int]:
    """Have a daemon and a streamer; yields the streamer's process number."""
    run = Path(config.job.run_directory)
    endpoints = [str(endpoint) for endpoint in etcd.endpoints]
    commands = [
        daemon_command(run, endpoints, config.job.name),
        streamer_command(config=config, run=run, host=HOST, logs=run / "logs" / HOST, etcd=etcd_words(etcd)),
    ]
    with ExitStack() as stack:
        pids = []
        for place, words in enumerate(commands):
            log = stack.enter_context((root / f"program-{place}.log").open("wb"))
            process = subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
            stack.callback(process.wait)
            stack.callback(process.send_signal, signal.SIGTERM)
            pids.append(process.pid)
        yield pids[1]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        HOST_VARIABLE: HOST,
    }


def _config(root: Path, num_ranks: int, model: dict[str, int], steps: int) -> Config:
    data = write_corpus(root / "data" / "train", 2_000_000, VOCAB_SIZE)
    boxes = Path("/dev/shm") if Path("/dev/shm").is_dir() else root
    return Config.from_dict(
        {
            "job": {"name": "telemetry-overhead", "run_directory": str(root / "run")},
            "model": {**model, "vocab_size": VOCAB_SIZE},
            "data": {"train": str(data)},
            "batch": {"micro_batch_size": 1, "global_batch_size": NUM_MICROBATCHES * num_ranks},
            "train": {"steps": steps + WARMUP + 1, "precision": "fp32"},
            "optimizer": {"lr": 1e-4},
            "checkpoint": {"interval": 0, "save_at_end": False},
            "telemetry": {"black_box_directory": str(boxes)},
            "log": {"interval": 1000},
        }
    )
