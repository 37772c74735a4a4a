"""The event store at 12,288 ranks x 100 steps x 8 operations: the cost of commits, and of queries on the Parquet files.

The peer is pyarrow.dataset with numpy on the same files. Both sides answer each query in turn, in one process, and must
give the same answer. The first query of a process also reads footers and checksums; it has its own column.

Run alone on the machine: python -m benchmarks event_store [--write]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.dataset as ds

from benchmarks.bars import at_least
from benchmarks.result import Result
from megatrain.contracts.black_box.operations import Operation
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import StepTotals, from_columns, num_rows
from megatrain_diagnostics.store.compaction import HOUR_IS_OVER_NS, compact
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.segment_store import SegmentStore
from megatrain_diagnostics.store.step_cells import step_cells

RANKS, STEPS = 12_288, 100
OPERATIONS = (
    Operation.FORWARD_COMPUTE, Operation.BACKWARD_COMPUTE, Operation.FORWARD_SEND, Operation.FORWARD_RECV,
    Operation.BACKWARD_SEND, Operation.BACKWARD_RECV, Operation.PARAMS_ALL_GATHER, Operation.OPTIMIZER,
)  # fmt: skip
SLOW_RANK = 777
REPEATS = 9
RATIO_BAR = 1.0
ONE_RANK = Where(ranks=(SLOW_RANK,), first_step=40, last_step=49)
TEN_STEPS = Where(first_step=40, last_step=49)
HOUR_NS = 3600 * 10**9


def run() -> Result:
    """Write the rows, query both sides, merge the segments, and query again."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        commits = _fill(directory)
        rows = _ask(directory, f"{STEPS} segments")
        compact(directory, time.time_ns() + HOUR_NS + HOUR_IS_OVER_NS)
        for path in _replaced(directory):
            path.unlink()
        rows += _ask(directory, f"{len(_files(directory))} segments, merged")
        num_bytes = sum(path.stat().st_size for path in _files(directory))
    num_events = RANKS * STEPS * len(OPERATIONS)
    return Result(
        name="event-store",
        title=f"Event store: {RANKS:,} ranks x {STEPS} steps x {len(OPERATIONS)} operations",
        command="python -m benchmarks event_store --write",
        rows=rows,
        notes=[
            _commit_note(commits),
            f"merged: {num_bytes / 1e6:.0f} MB, {num_bytes / num_events:.1f} bytes a row",
            "heat map: the forward-compute of each rank in each step",
            f"medians of {REPEATS} in one process, sides in turn; `first`: a fresh reader, with footers and checksums",
            "the peer gives the same answers, but verifies no checksums, orders no rows, and drops no duplicates",
        ],
        settings={"ranks": RANKS, "steps": STEPS, "operations": len(OPERATIONS)},
        bars=[
            at_least(f"heat map of {row['files']}: pyarrow.dataset's ms / ours", row["ratio"], RATIO_BAR)
            for row in rows
            if row["question"] == "heat map"
        ],
    )


def _commit_note(seconds: list[float]) -> str:
    num_rows_of_commit = RANKS * len(OPERATIONS)
    median_ms, worst_ms = 1e3 * statistics.median(seconds), 1e3 * max(seconds)
    rate = num_rows_of_commit * len(seconds) / sum(seconds) / 1e6
    times = f"median {median_ms:.0f} ms, worst {worst_ms:.0f} ms, {rate:.1f} M rows/s by one thread"
    return f"append and commit, with fsync, of {num_rows_of_commit:,} rows: {times}"


def _fill(directory: Path) -> list[float]:
    """Write one segment for each step; return the seconds that each took."""
    rng = np.random.default_rng(0)
    seconds = []
    with SegmentStore(directory) as store:
        for step in range(STEPS):
            batch = to_arrow(_rows(step, rng))
            began = time.perf_counter()
            store.append(StepTotals, batch)
            store.commit()
            seconds.append(time.perf_counter() - began)
    return seconds


def _rows(step: int, rng: np.random.Generator) -> StepTotals:
    count = RANKS * len(OPERATIONS)
    rank = np.repeat(np.arange(RANKS), len(OPERATIONS))
    operation = np.tile([one.number for one in OPERATIONS], RANKS)
    sum_ns = rng.normal(5e8, 1e7, count).astype(np.int64)
    is_slow = (rank == SLOW_RANK) & (operation == Operation.FORWARD_COMPUTE.number)
    sum_ns[is_slow] = sum_ns[is_slow] * 112 // 100
    return from_columns(
        StepTotals,
        {
            "round": np.ones(count),
            "rank": rank,
            "sequence": np.tile(np.arange(len(OPERATIONS)), RANKS) + step * 2500,
            "step": np.full(count, step),
            "operation": operation,
            "start_ns": time.time_ns() + np.repeat(rng.integers(0, 10**6, RANKS), len(OPERATIONS)),
            "sum_ns": sum_ns,
            "max_ns": sum_ns // 10,
            "count": np.full(count, 32),
            "num_bytes": rng.integers(0, 5, count) << 20,
        },
    )


def _ask(directory: Path, files: str) -> list[dict[str, Any]]:
    """Return a row for each query."""
    peer = ds.dataset([str(path) for path in _files(directory)])
    questions: dict[str, tuple[Callable[[StoredEvents], Any], Callable[[], Any]]] = {
        "heat map": (_heat, lambda: _peer_heat(peer)),
        "1 rank x 10 steps": (
            lambda events: num_rows(events.read(StepTotals, ONE_RANK)),
            lambda: _peer_window(peer, pc.field("rank") == SLOW_RANK),
        ),
        "all ranks x 10 steps": (
            lambda events: num_rows(events.read(StepTotals, TEN_STEPS)),
            lambda: _peer_window(peer, pc.scalar(True)),
        ),
    }
    rows: list[dict[str, Any]] = []
    for question, (ours, theirs) in questions.items():
        first_ms, _ = _timed(partial(_ask_reopened, ours, directory))
        events = StoredEvents(directory)
        ours(events)
        pairs = [(_timed(partial(ours, events)), _timed(theirs)) for _ in range(REPEATS)]
        (_, ours_found), (_, theirs_found) = pairs[0]
        if not np.array_equal(ours_found, theirs_found):
            raise RuntimeError(f"{question}: both sides give different answers")
        ours_ms, theirs_ms = (statistics.median(pair[side][0] for pair in pairs) for side in (0, 1))
        rows.append(
            {
                "question": question,
                "files": files,
                "first ms": first_ms,
                "ms": ours_ms,
                "worst ms": max(pair[0][0] for pair in pairs),
                "pyarrow.dataset ms": theirs_ms,
                "ratio": theirs_ms / ours_ms,
            }
        )
    return rows


def _ask_reopened(question: Callable[[StoredEvents], Any], directory: Path) -> Any:
    return question(StoredEvents(directory))


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = action()
    return 1e3 * (time.perf_counter() - began), found


def _heat(events: StoredEvents) -> Any:
    return step_cells(events, 1, Operation.FORWARD_COMPUTE.number, "sum_ns", range(STEPS), RANKS)


def _peer_heat(peer: ds.Dataset) -> Any:
    chosen = (pc.field("operation") == Operation.FORWARD_COMPUTE.value) & (pc.field("round") == 1)
    table = peer.to_table(columns=["rank", "step", "sum_ns"], filter=chosen)
    grid = np.full((STEPS, RANKS), np.nan)
    grid[table.column("step").to_numpy(), table.column("rank").to_numpy()] = table.column("sum_ns").to_numpy()
    return grid


def _peer_window(peer: ds.Dataset, chosen: pc.Expression) -> int:
    steps = (pc.field("step") >= TEN_STEPS.first_step) & (pc.field("step") <= TEN_STEPS.last_step)
    count: int = peer.to_table(filter=steps & chosen).num_rows
    return count


def _files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.parquet"))


def _replaced(directory: Path) -> list[Path]:
    """Return the files that merged ones replace. A daemon removes them after a minute; the peer would read both."""
    return [path for path in _files(directory) if path.name[:12] == path.name[13:25]]
