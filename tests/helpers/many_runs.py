"""A directory of run directories as launches leave them: trained, failed, killed, running, damaged.

`python -m tests.helpers.many_runs DIR [NUM]` writes NUM runs; `megatrain dashboard --runs DIR` lists them.
"""

from __future__ import annotations

import fcntl
import math
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.config.config import Config
from megatrain.config.load import load_config
from megatrain.config.serialize import to_toml
from megatrain.contracts.records.record import encode
from megatrain.reporting.jsonl_sink import JsonLinesSink
from megatrain.reporting.report import IntervalReport, SourceReport, StepReport
from megatrain.run_files.run_directory import RunDirectory
from tests.helpers.checkpoint_tree import put_main
from tests.helpers.launched_job import make_incident
from tests.helpers.source_tree import ROOT

BEGAN_S = 1_800_000_000.0
STEP_S = 2.0
TOKENS = 4096
NUM_RANKS = 4
HERE = f"process 17 on {socket.gethostname()}"


def demo_config(name: str, **changes: object) -> Config:
    """Return the configuration of the demo for another job; `changes` by section: batch={"global_size": 16}."""
    config = load_config(ROOT / "configs" / "demo.toml").config
    config = replace(config, job=replace(config.job, name=name))
    for section, values in changes.items():
        config = replace(config, **{section: replace(getattr(config, section), **values)})
    return config


def write_run(
    root: Path,
    *,
    num_steps: int = 60,
    exit_code: int | None = 0,
    config: Config | None = None,
    loss: float = 2.0,
    step_s: float = STEP_S,
    began_s: float = BEGAN_S,
    first_step: int = 1,
    has_incident: bool = False,
) -> RunDirectory:
    """Write a run whose launch is gone. `exit_code` None: it was killed."""
    run = RunDirectory(root)
    run.create()
    (root / "config.toml").write_text(to_toml(config or demo_config(root.name)))
    place = root / "coordination"
    place.mkdir(mode=0o700)
    (place / "lock").write_text(f"{HERE}\n")
    if exit_code is not None:
        (place / "exit-code").write_text(f"{exit_code}\n")
    ended_s = began_s + num_steps * step_s
    for path in place.iterdir():
        os.utime(path, (ended_s, ended_s))
    report_steps(run, range(first_step, first_step + num_steps), loss=loss, step_s=step_s, began_s=began_s)
    if has_incident:
        (run.incidents / "20270115-0001.json").write_bytes(encode(make_incident()))
    return run


def report_steps(
    run: RunDirectory,
    steps: range,
    *,
    loss: float,
    step_s: float,
    began_s: float,
    sources: Callable[[int], Sequence[SourceReport]] = lambda step: (),
) -> None:
    """Write reports of these steps as rank 0 does, beginning at `began_s`. `sources`: the reports of a step's
    sources."""
    now_s = began_s
    sink = JsonLinesSink(run.metrics_file, unix_time=lambda: now_s)
    for step in steps:
        now_s += step_s
        report = step_report(step, loss + 8.0 / math.sqrt(step), step_s)
        sink.write(replace(report, sources=tuple(sources(step))))
        if step % 10 == 0:
            sink.write(interval_report(step, step_s))
    sink.close()


def step_report(step: int, loss: float, step_s: float) -> StepReport:
    return StepReport(
        step=step, loss=loss, grad_norm=1.0, lr=3e-4, duration_s=step_s, data_wait_s=0.01, num_tokens=TOKENS,
        consumed_samples=8 * step, consumed_tokens=TOKENS * step, global_batch_size=8, is_skipped=False, num_skipped=0,
        memory_bytes=10**9, world_size=NUM_RANKS,
    )  # fmt: skip


def interval_report(step: int, step_s: float) -> IntervalReport:
    """Return the metrics of ten steps. `mfu` holds for steps of `STEP_S`."""
    rate = TOKENS / step_s / NUM_RANKS
    return IntervalReport(
        step=step, num_steps=10, wall_s=10 * step_s, loss=2.0, grad_norm=1.0, lr=3e-4, tokens_per_s=rate * NUM_RANKS,
        tokens_per_s_per_rank=rate, flops_per_s_per_rank=1e12, mfu=0.4 * STEP_S / step_s, step_ms=1e3 * step_s,
        data_wait_ms=10.0, memory_bytes=10**9, num_skipped=0, consumed_tokens=TOKENS * step,
    )  # fmt: skip


@contextmanager
def held(run: RunDirectory) -> Iterator[None]:
    """Hold the lock of a run during the block, as its launch does."""
    with (run.root / "coordination" / "lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_many(runs: Path, num: int) -> None:
    """Write `num` runs of all kinds."""
    for number in range(num):
        code = (0, 75, 1, None, 0, 0)[number % 6]
        name = f"run-{number:04d}"
        config = demo_config(name, optimizer={"lr": 1e-4 * (1 + number % 5)})
        write_run(
            runs / name, num_steps=40 + number % 300, exit_code=code, config=config, loss=1.5 + number % 7 / 10,
            step_s=STEP_S * (1 + number % 4 / 10), began_s=BEGAN_S + 3600.0 * number, has_incident=number % 9 == 0,
        )  # fmt: skip
        if number % 4 == 0:
            put_main(LocalLocation(runs / name / "checkpoints"), 40)


if __name__ == "__main__":
    write_many(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 500)
