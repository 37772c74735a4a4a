"""The cost of always-on telemetry for a training step. It is switched on and off live, in paired blocks of 10 steps.

The rank is the real trainer. etcd, a daemon and the host's streamer run on the same machine, as in a job. On a cluster
the daemon runs on another machine, which is the first case. The control page is the switch.
Run alone on the machine: python -m benchmarks telemetry_overhead [--write]
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

from benchmarks.bars import at_most
from benchmarks.result import Result
from benchmarks.telemetry_rank import is_on
from megatrain.config.config import Config
from megatrain.config.serialize import to_toml
from megatrain.contracts.process import HOST_VARIABLE
from megatrain_diagnostics.launched import job_commands, streamer_command
from megatrain_job.commands.etcd_flags import etcd_arguments
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_launcher.etcd.process import free_port
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.tiny_data import write_corpus

BLOCK = 10
WARMUP = 200
"""Steps left out at the begin: a multiple of four blocks."""
STEPS = 10_000
HOST = "bench"
VOCAB_SIZE = 512
ELSEWHERE, BESIDE = "daemon elsewhere", "daemon on this machine"
MODEL = {"seq_len": 128, "hidden_size": 192, "num_layers": 4, "num_heads": 4}
NUM_MICROBATCHES = 4
BOUND = 1.004
_Z_95 = 1.645


def run(steps: int = STEPS, title: str = "") -> Result:
    """Measure with the daemon at both places. `title`: only the case of this name."""
    rows = [_measure(name, steps) for name in (ELSEWHERE, BESIDE) if title in ("", name)]
    return Result(
        name="telemetry-overhead",
        title="What always-on telemetry costs a step",
        command="python -m benchmarks telemetry_overhead --write",
        rows=rows,
        notes=[
            (
                f"ratio: seconds of a step with telemetry / those without, from the medians of blocks of {BLOCK} "
                f"steps, paired with their neighbour, order on-off-off-on; first {WARMUP} steps left out"
            ),
            "upper 95 %: one-sided, of the mean of the pairs' logarithms",
            (
                "on: all spans timed and on record, one step in 10 streamed in full, totals and values of all; off: no "
                "span is timed (span mask 0)"
            ),
            (
                f"{ELSEWHERE}: a daemon that only acknowledges; {BESIDE}: the real daemon with its store, as under "
                "`megatrain launch --standalone`; the last columns: the share of a core that the streamer, at nice "
                "10, and that daemon use"
            ),
        ],
        settings={"micro_batches": NUM_MICROBATCHES, **MODEL, "vocab_size": VOCAB_SIZE},
        bars=[at_most(f"{row['case']}, ratio, upper 95 %", row["upper 95 %"], BOUND) for row in rows],
    )


def _measure(name: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="telemetry-overhead-") as directory:
        began_ns, (daemon_s, streamer_s) = _train(Path(directory), steps, is_beside=name == BESIDE)
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
        "daemon, cores": round(daemon_s / sum(seconds), 4),
    }


def pair_ratios(seconds: Sequence[float], block: int, warmup: int) -> list[float]:
    """Return for each pair of neighbouring blocks the ratio on / off of their medians."""
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


def _train(root: Path, steps: int, *, is_beside: bool) -> tuple[list[int], list[float]]:
    """Train; return when each step began in ns, and the processor seconds of daemon and streamer."""
    config = _config(root, steps)
    file, times = root / "config.toml", root / "times.json"
    file.write_text(to_toml(config))
    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdServers(root))
        with _diagnosis(root, config, EtcdSettings.of(etcd.urls), is_beside=is_beside) as programs:
            command = [sys.executable, "-m", "benchmarks.telemetry_rank", str(times), str(BLOCK), str(file)]
            rank = subprocess.Popen(command, env=_environment(free_port("127.0.0.1")), stdout=subprocess.DEVNULL)
            stack.callback(rank.kill)  # for an interrupt; no effect on a process that has ended
            code = rank.wait()
            cpu_s = [_cpu_seconds(pid) for pid in programs]
    if code:
        raise RuntimeError(f"the rank ended with {code}")
    return json.loads(times.read_text()), cpu_s


@contextmanager
def _diagnosis(root: Path, config: Config, etcd: EtcdSettings, *, is_beside: bool) -> Iterator[list[int]]:
    """Run a daemon and a streamer during the block; yields their process ids."""
    run = Path(config.job.run_directory)
    sink = [sys.executable, "-m", "benchmarks.telemetry_sink", config.job.name, str(etcd.endpoints[0])]
    commands = [
        job_commands(config=config, run=run, etcd=etcd_arguments(etcd))["diagnostics"] if is_beside else sink,
        streamer_command(config=config, run=run, host=HOST, logs=run / "logs" / HOST, etcd=etcd_arguments(etcd)),
    ]
    with ExitStack() as stack:
        pids = []
        for place, command in enumerate(commands):
            log = stack.enter_context((root / f"program-{place}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
            stack.callback(process.wait)
            stack.callback(process.send_signal, signal.SIGTERM)
            pids.append(process.pid)
        yield pids


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _environment(port: int) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        HOST_VARIABLE: HOST,
    }


def _config(root: Path, steps: int) -> Config:
    data = write_corpus(root / "data" / "train", 2_000_000, VOCAB_SIZE)
    boxes = Path("/dev/shm") if Path("/dev/shm").is_dir() else root
    return Config.from_dict(
        {
            "job": {"name": "telemetry-overhead", "run_directory": str(root / "run")},
            "model": {**MODEL, "vocab_size": VOCAB_SIZE},
            "data": {"train": str(data)},
            "batch": {"micro_batch_size": 1, "global_batch_size": NUM_MICROBATCHES},
            "train": {"steps": steps + WARMUP + 1, "precision": "fp32"},
            "optimizer": {"lr": 1e-4},
            "checkpoint": {"interval_s": 0.0, "save_at_end": False},
            "telemetry": {"black_box_directory": str(boxes)},
            "log": {"interval": 1000},
        }
    )
