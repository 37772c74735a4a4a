"""A run directory of an invented job of maximum size: sums of all ranks, and a few steps span by span.

`python -m tests.helpers.synthetic_run DIR` writes one of 12,288 ranks and 100 steps (tp 8, pp 8, dp 192), in which rank
777 computes longer than its peers; `megatrain dashboard --replay DIR` shows it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatrain.contracts.black_box.operations import Operation, StepValue
from megatrain.contracts.layout import Layout
from megatrain.run_files.run_directory import RunDirectory
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.tables import Spans, StepTotals, Table, Values, joined, select
from megatrain_diagnostics.store.segment_store import SegmentStore
from tests.helpers.synthetic_steps import BACKWARD, FORWARD, START_NS, STEP_S, SyntheticJob, values_of_ranks
from tests.helpers.table_rows import table_rows

LARGEST = Layout(tp_size=8, pp_size=8, dp_size=192)
SLOW_RANK = 777
NUM_STEPS = 100
_STEPS_AT_ONCE = 10
_TOKENS = 2_000_000
_NUM_MICROBATCHES = 32
_AFTER_ALL = 10**9
"""No other record of a rank has such a high number: it distinguishes records."""


def write_run(
    root: Path, layout: Layout = LARGEST, *, full_steps: Sequence[int] = (), full_ranks: range = range(0)
) -> RunDirectory:
    """Write the run; of `full_steps` the spans of `full_ranks`, about 390 for each rank and step."""
    run = RunDirectory(root)
    run.create()
    job = SyntheticJob(layout, ranks_per_host=8, compute_factor={SLOW_RANK: 1.3})
    with SegmentStore(run.events) as store:
        _commit(store, job.ranks())
        for first in range(0, NUM_STEPS, _STEPS_AT_ONCE):
            made = [job.step(step) for step in range(first, min(first + _STEPS_AT_ONCE, NUM_STEPS))]
            _commit(store, joined(StepTotals, [totals for totals, _ in made]))
            reported = [_step_values(layout, step) for step in range(first, first + len(made))]
            lengths = [select(values, values.kind == int(StepValue.SQUARED_LENGTHS)) for _, values in made]
            _commit(store, joined(Values, [*lengths, *reported]))
        for step in full_steps:
            _commit(store, spans_of_step(layout, step, full_ranks))
    return run


def _commit(store: SegmentStore, table: Table) -> None:
    store.append(type(table), to_arrow(table))
    store.commit()


def _step_values(layout: Layout, step: int) -> Values:
    """Return the values that the first and the last rank report of a step; a loss needs two reports."""
    loss = 2.0 + 9.0 / (1.0 + 0.1 * step)
    numbers = {StepValue.LOSS: loss, StepValue.GRAD_NORM: 1.0, StepValue.TOKENS: float(_TOKENS)}
    reported = values_of_ranks((0, layout.world_size - 1), step, numbers)
    return replace(reported, sequence=reported.sequence + _AFTER_ALL)


def spans_of_step(layout: Layout, step: int, ranks: range, num_microbatches: int = _NUM_MICROBATCHES) -> Spans:
    """Return the spans of these ranks: all forward passes, then all backward passes (GPipe), and the optimizer."""
    rank = np.array(ranks)
    stage = np.array([layout.coordinate(one)["pp"] for one in ranks])
    begin = np.full(len(rank), START_NS + int(step * STEP_S * 1e9), dtype=np.float64)
    forward_ns, backward_ns = FORWARD * 1e9 / num_microbatches, BACKWARD * 1e9 / num_microbatches
    gap_ns = 0.04 * forward_ns
    rows: list[tuple[Operation, int, object, float]] = []
    last = layout.pp_size - 1
    for microbatch in range(num_microbatches):
        at = begin + (microbatch + stage) * forward_ns
        rows.append((Operation.FORWARD_RECV, microbatch, at - 2 * gap_ns, gap_ns))
        rows.append((Operation.FORWARD_COMPUTE, microbatch, at, forward_ns - gap_ns))
        rows.append((Operation.TP_ALL_GATHER, microbatch, at + gap_ns, 2 * gap_ns))
        rows.append((Operation.TP_REDUCE_SCATTER, microbatch, at + 8 * gap_ns, 2 * gap_ns))
        rows.append((Operation.FORWARD_SEND, microbatch, at + forward_ns - gap_ns, gap_ns))
        at = begin + (num_microbatches + last) * forward_ns + (microbatch + last - stage) * backward_ns
        rows.append((Operation.BACKWARD_RECV, microbatch, at - 2 * gap_ns, gap_ns))
        rows.append((Operation.BACKWARD_COMPUTE, microbatch, at, backward_ns - gap_ns))
        rows.append((Operation.TP_ALL_GATHER, microbatch, at + gap_ns, 2 * gap_ns))
        rows.append((Operation.TP_REDUCE_SCATTER, microbatch, at + 8 * gap_ns, 2 * gap_ns))
        rows.append((Operation.BACKWARD_SEND, microbatch, at + backward_ns - gap_ns, gap_ns))
    end = begin + (num_microbatches + last) * (forward_ns + backward_ns)
    rows.append((Operation.GRADS_REDUCE_SCATTER, -1, end, 5 * gap_ns))
    rows.append((Operation.OPTIMIZER, -1, end + 5 * gap_ns, 5 * gap_ns))
    num, count = len(rank), len(rows)
    starts = np.stack([np.asarray(start, dtype=np.float64) for _, _, start, _ in rows], axis=1).astype(np.int64)
    columns = {
        "round": 1, "rank": np.repeat(rank, count), "sequence": np.tile(step * 100_000 + np.arange(count), num),
        "step": step, "operation": np.tile([operation.number for operation, _, _, _ in rows], num),
        "microbatch": np.tile([microbatch for _, microbatch, _, _ in rows], num), "start_ns": starts.reshape(-1),
        "duration_ns": np.tile([int(length) for _, _, _, length in rows], num), "launch_ns": starts.reshape(-1),
    }  # fmt: skip
    return table_rows(Spans, columns)


if __name__ == "__main__":
    write_run(Path(sys.argv[1]), full_steps=(NUM_STEPS - 1,), full_ranks=range(0, LARGEST.world_size, 40))
