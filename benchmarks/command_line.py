"""Seconds of commands, compared with those of the bare interpreter; and of a rank's imports, compared with torch's.

The commands take turns, in the opposite order in every second round. The finished run comes from a launch of one rank.
Run alone on the machine: python -m benchmarks command_line [--write]
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, at_most
from benchmarks.result import Result
from benchmarks.throughput_ranks import ROOT, SINGLE, write_random_tokens
from megatrain_launcher.commands.status import StatusCode

ROUNDS = 7
LARGE = "configs/megascale_175b.toml"
DRY_RUN_BAR_S = 10.0
HELP_BAR, STATUS_BAR = 6.0, 15.0
"""The bars for `megatrain --help` and `megatrain status` / the seconds of `python -c pass`."""


@dataclass(frozen=True, slots=True)
class TimedCommand:
    """A command, the name of the one that its seconds are divided by, and its exit code."""

    name: str
    arguments: Sequence[str]
    beside: str = "python -c pass"
    code: int = 0


def run() -> Result:
    """Make a finished run, then measure every command."""
    with tempfile.TemporaryDirectory(prefix="command-line-") as name:
        finished = _finished_run(Path(name))
        commands = [
            TimedCommand("python -c pass", ["-c", "pass"]),
            TimedCommand("megatrain --help", ["-m", "megatrain", "--help"]),
            TimedCommand("megatrain status, finished run", ["-m", "megatrain", "status", str(finished)],
                    code=StatusCode.ENDED),
            TimedCommand("megatrain config check", ["-m", "megatrain", "config", "check", LARGE]),
            TimedCommand("megatrain config check --dry-run, 175B on 12,288 ranks",
                    ["-m", "megatrain", "config", "check", LARGE, "--dry-run"]),
            TimedCommand("import torch", ["-c", "import torch"]),
            TimedCommand("what a rank imports", ["-c", "import megatrain.training.worker"], "import torch"),
        ]  # fmt: skip
        seconds, processor_s = _measure(commands)
    rows = [_row(command, seconds, processor_s) for command in commands]
    return Result(
        name="command-line",
        title="Seconds of commands",
        command="python -m benchmarks command_line --write",
        rows=rows,
        notes=[
            f"medians of {ROUNDS} after one that is not counted; Python's compiled files exist",
            "processor s: user and system time of the command and its processes",
            "ratio: seconds / those of `python -c pass`; of what a rank imports: / those of `import torch`",
        ],
        bars=_bars(rows),
    )


def _bars(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    by_name = {row["command"]: row for row in rows}
    dry_run = "megatrain config check --dry-run, 175B on 12,288 ranks"
    return [
        at_most("megatrain --help / python -c pass", by_name["megatrain --help"]["ratio"], HELP_BAR),
        at_most("megatrain status / python -c pass", by_name["megatrain status, finished run"]["ratio"], STATUS_BAR),
        at_most(f"{dry_run}, s", by_name[dry_run]["s"], DRY_RUN_BAR_S),
    ]


def _finished_run(directory: Path) -> Path:
    prefix, finished = directory / "train", directory / "run"
    write_random_tokens(prefix)
    command = [
        sys.executable, "-m", "megatrain", "launch", "--standalone", "--nproc-per-node=1", "--no-daemon",
        "configs/demo.toml", *SINGLE, f"--job.run_directory={finished}", f"--data.train={prefix}",
        "--data.validation=", "--data.tokenizer=", "--train.steps=2", "--optimizer.lr_warmup_steps=0",
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return finished


def _measure(commands: Sequence[TimedCommand]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds and the processor seconds of each round of each command."""
    seconds: dict[str, list[float]] = {command.name: [] for command in commands}
    processor_s: dict[str, list[float]] = {command.name: [] for command in commands}
    for turn in range(ROUNDS + 1):
        for command in commands[:: 1 if turn % 2 == 0 else -1]:
            before, began = _children_s(), time.perf_counter()
            arguments = [sys.executable, *command.arguments]
            done = subprocess.run(arguments, check=False, cwd=ROOT, env=os.environ, stdout=subprocess.DEVNULL)
            assert done.returncode == command.code, (arguments, done.returncode)
            if turn:
                seconds[command.name].append(time.perf_counter() - began)
                processor_s[command.name].append(_children_s() - before)
    return seconds, processor_s


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _row(command: TimedCommand, seconds: dict[str, list[float]], processor_s: dict[str, list[float]]) -> dict[str, Any]:
    own = seconds[command.name]
    return {
        "command": command.name,
        "s": statistics.median(own),
        "least s": min(own),
        "most s": max(own),
        "processor s": statistics.median(processor_s[command.name]),
        "ratio": statistics.median(own) / statistics.median(seconds[command.beside]),
    }
