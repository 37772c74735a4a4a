"""The cost of a span: the median nanoseconds of one, over blocks, compared with torch's own and an empty `with` block.

Run alone on the machine: python -m benchmarks span_overhead [--write]
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.bars import at_most
from benchmarks.result import Result
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.reader import write_control
from megatrain.contracts.black_box.values import ControlPage, Identity
from megatrain.contracts.layout import Layout
from megatrain.run_files.run_directory import black_box_path
from megatrain.telemetry.recorder import Recorder, open_recorder

BLOCKS = 60
SPANS_A_BLOCK = 4096
"""The number of spans that the recorder sums at once, so that every block includes the cost of one summation."""
BAR_NS = 4000.0
RECORDS = 65536


class Nothing:
    """A context manager that does nothing, to measure the cost of `with` itself."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def cases(recorder: Recorder, group: int) -> dict[str, Callable[[], None]]:
    nothing = Nothing()

    def empty_with() -> None:
        with nothing:
            pass

    def compute_span() -> None:
        with recorder.span(Operation.FORWARD_COMPUTE, microbatch=3, chunk=1):
            pass

    def collective_span() -> None:
        with recorder.span(Operation.TP_ALL_GATHER, num_bytes=4096, group=group):
            pass

    def begin_and_end() -> None:
        recorder.end(recorder.begin(Operation.GRADS_REDUCE_SCATTER, chunk=1, num_bytes=4096, group=group))

    return {
        "empty with": empty_with,
        "compute span": compute_span,
        "collective span": collective_span,
        "begin and end": begin_and_end,
    }


def torch_span() -> None:
    with record_function("span"):
        pass


def median_ns(case: Callable[[], None]) -> tuple[float, float]:
    """Return median and 90th percentile over blocks of the mean time of one call."""
    means = []
    for _ in range(BLOCKS):
        started = time.perf_counter_ns()
        for _ in range(SPANS_A_BLOCK):
            case()
        means.append((time.perf_counter_ns() - started) / SPANS_A_BLOCK)
    return statistics.median(means), statistics.quantiles(means, n=10)[-1]


def measure(title: str, cases: Mapping[str, Callable[[], None]]) -> list[dict[str, Any]]:
    """Return a row for each case."""
    rows: list[dict[str, Any]] = []
    for name, case in cases.items():
        median, slow = median_ns(case)
        rows.append({"recorder": title, "case": name, "median ns": round(median), "p90 ns": round(slow)})
    return rows


def run() -> Result:
    """Measure recorded spans, spans that the control page switches off, and those of torch's profiler."""
    directory = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    identity = Identity("span-overhead", "main", 0, 0, Layout(), os.getpid(), os.uname().nodename)
    recorder = open_recorder(identity, directory=str(directory), run_key="benchmark", num_records=RECORDS)
    path = black_box_path(directory, identity.job, "benchmark", identity.branch, 0, 0)
    group = recorder.add_group("tp", [0])
    try:
        recorder.set_step(1)
        rows = measure("recorded", cases(recorder, group))
        write_control(path, ControlPage(span_mask=0))
        recorder.set_step(2)
        rows += measure("switched off", cases(recorder, group))
    finally:
        recorder.close()
    bars = [at_most(f"{row['recorder']}, {row['case']}, ns", row["median ns"], BAR_NS) for row in rows]
    slowest_ns = max(row["median ns"] for row in rows)
    with profile(activities=[ProfilerActivity.CPU]):
        [peer] = measure("torch's profiler", {"record_function": torch_span})
    bars.append(at_most("slowest span / torch's", slowest_ns / peer["median ns"], 1))
    return Result(
        name="span-overhead",
        title="What a span costs",
        command="python -m benchmarks span_overhead --write",
        rows=[*rows, peer],
        notes=[f"mean of {SPANS_A_BLOCK} calls a block, median and p90 over {BLOCKS} blocks, black box in {directory}"],
        bars=bars,
    )
