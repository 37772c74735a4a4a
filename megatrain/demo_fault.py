"""`make demo-fault`: the training of `make demo`, with one of its processes killed in the middle.

No manual restart is needed: the launcher detects the failure, stops the other processes, restarts all of them from the
newest snapshot, and records an incident. The program shows the incident at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatrain.checkpoint_format.branches import MAIN_BRANCH
from megatrain.cli import run_and_report
from megatrain.config.load import load_config
from megatrain.contracts.black_box.reader import BlackBoxReader
from megatrain.contracts.errors import DataError
from megatrain.demo import build_data, demo_parser, launch_arguments, remove_earlier_run
from megatrain.run_files.run_directory import RunDirectory, black_box_path

STEPS = 60
CHECKPOINT_INTERVAL = 10
FAULT_STEP = 25
RANK = 5
_POLL_S = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; return 0 when training recovered and completed."""
    parser = demo_parser("python -m megatrain.demo_fault", "train on 8 CPU processes, and kill one of them")
    args = parser.parse_args(argv)
    args.overrides = [
        *(f"--train.steps={STEPS}", f"--checkpoint.interval={CHECKPOINT_INTERVAL}", "--job.name=demo-fault"),
        *args.overrides,
    ]
    run = RunDirectory(args.output / "fault")
    remove_earlier_run(run)
    arguments = launch_arguments(args, run, build_data(args))
    print(f"\n== train, and kill rank {RANK} at step {FAULT_STEP}\n$ python -m {shlex.join(arguments)}", flush=True)
    launch = subprocess.Popen([sys.executable, "-m", *arguments])
    try:
        _kill_a_rank(args, run, launch)
        code = launch.wait()
    except BaseException:
        launch.terminate()
        launch.wait()
        raise
    if code != 0:
        return code
    show = ["megatrain", "incidents", "last", f"--job={run.root}"]
    print(f"\n== what happened\n$ python -m {shlex.join(show)}", flush=True)
    return subprocess.run([sys.executable, "-m", *show], check=False).returncode


def _kill_a_rank(args: argparse.Namespace, run: RunDirectory, launch: subprocess.Popen[bytes]) -> None:
    """Kill rank RANK when step FAULT_STEP is completed; do nothing if training ends before that step."""
    config = load_config(args.config).config
    box = black_box_path(
        Path(config.telemetry.black_box_directory), "demo-fault", run.key, MAIN_BRANCH, round_number=1, rank=RANK
    )
    while launch.poll() is None and steps_done(run.metrics / "metrics.jsonl") < FAULT_STEP:
        time.sleep(_POLL_S)
    try:
        with BlackBoxReader(box) as reader:
            pid = reader.identity.pid
    except DataError:
        return
    print(f"\n== kill -9 {pid}, which is rank {RANK}\n", flush=True)
    os.kill(pid, signal.SIGKILL)


def steps_done(metrics: Path) -> int:
    """Return the newest step in a metrics file; 0 if there is none."""
    if not metrics.exists():
        return 0
    # the last line may be half written
    lines = metrics.read_text().rpartition("\n")[0].splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else 0


if __name__ == "__main__":
    sys.exit(run_and_report(main))
