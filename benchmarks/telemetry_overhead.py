"""The cost of always-on telemetry for a training step. It is switched on and off while the rank trains (on_off.py).

The rank is the real trainer, and it ends when the cost is known well enough. etcd, a daemon and the host's streamer run
on the same machine, as in a job. On a cluster the daemon runs on another machine, which is the first case. The control
page is the switch.
Run alone on the machine: python -m benchmarks telemetry_overhead [--write]
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.bars import at_most
from benchmarks.on_off import BLOCK, MAX_HALF_WIDTH, MAX_S, WARMUP, is_on, ratio_and_half_width, turn_logs
from benchmarks.process_usage import cpu_s
from benchmarks.result import Result
from megatrain.config.config import Config
from megatrain.config.serialize import to_toml
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.process import HOST_VARIABLE
from megatrain_diagnostics.launched import job_commands, streamer_command
from megatrain_job.commands.etcd_flags import etcd_arguments
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_launcher.etcd.server import free_port
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.tiny_data import write_corpus

MAX_STEPS = 100_000
"""The rank ends earlier (on_off.is_enough)."""
HOST = "bench"
VOCAB_SIZE = 512
ELSEWHERE, BESIDE = "daemon elsewhere", "daemon on this machine"
MODEL = {"seq_len": 128, "hidden_size": 192, "num_layers": 4, "num_heads": 4}
NUM_MICROBATCHES = 4
BOUND = 1.004


def run() -> Result:
    """Measure with the daemon at both places."""
    rows = [_measure(name) for name in (ELSEWHERE, BESIDE)]
    return Result(
        name="telemetry-overhead",
        title="What always-on telemetry costs a step",
        command="python -m benchmarks telemetry_overhead --write",
        rows=rows,
        notes=[
            (
                f"ratio: seconds of steps with telemetry / those without, in turns of blocks of {BLOCK} steps, "
                f"on-off-off-on; the mean of the turns' logarithms without the largest and the smallest fifth; first "
                f"{WARMUP} steps left out"
            ),
            (
                "upper 95 %: one-sided, with the standard error of a trimmed mean; a case ends when this bound is at "
                f"most {MAX_HALF_WIDTH:.1%} above the ratio, or after {MAX_S:.0f} s; neither depends on the ratio, so "
                "the bound stays valid, and is only higher if the time is over"
            ),
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


def _measure(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="telemetry-overhead-") as directory:
        began_ns, (daemon_s, streamer_s) = _train(Path(directory), is_beside=name == BESIDE)
    seconds = [(later - earlier) / 1e9 for earlier, later in pairwise(began_ns)]
    logs = turn_logs(seconds)
    ratio, half_width = ratio_and_half_width(logs)
    off_s = [value for step, value in enumerate(seconds) if step >= WARMUP and not is_on(step)]
    return {
        "case": name,
        "steps": len(seconds) - WARMUP,
        "step without, ms": statistics.median(off_s) * 1e3,
        "turns": len(logs),
        "ratio": round(ratio, 5),
        "upper 95 %": round(ratio * (1.0 + half_width), 5),
        "streamer, cores": round(streamer_s / sum(seconds), 4),
        "daemon, cores": round(daemon_s / sum(seconds), 4),
    }


def _train(root: Path, *, is_beside: bool) -> tuple[list[int], list[float]]:
    """Train; return when each step began in ns, and the processor seconds of daemon and streamer."""
    config = _config(root)
    file, times = root / "config.toml", root / "times.json"
    file.write_text(to_toml(config))
    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdServers(root))
        with _diagnosis(root, config, EtcdSettings.of(etcd.urls), is_beside=is_beside) as programs:
            command = [sys.executable, "-m", "benchmarks.telemetry_rank", str(times), str(file)]
            rank = subprocess.Popen(command, env=_environment(free_port("127.0.0.1")), stdout=subprocess.DEVNULL)
            stack.callback(rank.kill)  # for an interrupt; no effect on a process that has ended
            code = rank.wait()
            used_s = [cpu_s(pid) for pid in programs]
    if code != ExitCode.SAVED_AND_STOPPED:
        raise RuntimeError(f"the rank ended with {code}")
    return json.loads(times.read_text()), used_s


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


def _config(root: Path) -> Config:
    data = write_corpus(root / "data" / "train", 2_000_000, VOCAB_SIZE)
    boxes = Path("/dev/shm") if Path("/dev/shm").is_dir() else root
    return Config.from_dict(
        {
            "job": {"name": "telemetry-overhead", "run_directory": str(root / "run")},
            "model": {**MODEL, "vocab_size": VOCAB_SIZE},
            "data": {"train": str(data)},
            "batch": {"micro_batch_size": 1, "global_batch_size": NUM_MICROBATCHES},
            "train": {"steps": MAX_STEPS, "precision": "fp32"},
            "optimizer": {"lr": 1e-4},
            "checkpoint": {"interval_s": 0.0, "save_at_end": False},
            "telemetry": {"black_box_directory": str(boxes)},
            "log": {"interval": 1000},
        }
    )
