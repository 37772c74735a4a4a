"""The spans that our own ranks would have recorded of an invented job: the inverse of `PipelineJob`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout
from megatrain_diagnostics.analysis.whatif.operations import JobShape, OperationTable
from megatrain_diagnostics.events.tables import Ranks, Spans, joined
from tests.helpers.synthetic_steps import rank_rows
from tests.helpers.table_rows import table_rows

BEGIN_NS = 1_780_000_000_000_000_000
STEP_NS = 60_000_000_000
ROUND = 3

_OPERATIONS = {
    "forward-compute": Operation.FORWARD_COMPUTE,
    "backward-compute": Operation.BACKWARD_COMPUTE,
    "backward-weight-compute": Operation.BACKWARD_WEIGHT_COMPUTE,
    "forward-send": Operation.FORWARD_SEND,
    "forward-recv": Operation.FORWARD_RECV,
    "backward-send": Operation.BACKWARD_SEND,
    "backward-recv": Operation.BACKWARD_RECV,
    "params-all-gather": Operation.PARAMS_ALL_GATHER,
    "grads-reduce-scatter": Operation.GRADS_REDUCE_SCATTER,
    "layernorm-grads-all-reduce": Operation.TP_ALL_REDUCE,
    "embedding-grads-all-reduce": Operation.EMBEDDING_ALL_REDUCE,
    "optimizer-clip-main-grad": Operation.CLIP,
    "optimizer": Operation.OPTIMIZER,
}


def recorded_spans(table: OperationTable, shape: JobShape) -> Spans:
    """Return the spans of all ranks: gathers follow the optimizer, and every message has a sender."""
    names = np.array(table.kinds)[table.kind]
    is_message = np.char.endswith(names, "-send") | np.char.endswith(names, "-recv")
    keep = np.isin(names, list(_OPERATIONS)) & ~(is_message & (table.duration_s == 0.0))
    if shape.tp_size == 1:
        keep &= names != "layernorm-grads-all-reduce"
    computes = {
        (name, *key): (chunk, microbatch)
        for name, *key, chunk, microbatch in zip(
            names, table.dp_rank, table.stage, table.step, table.sequence, table.chunk, table.microbatch, strict=True
        )
        if microbatch >= 0
    }
    parts = []
    optimizer = names == "optimizer"
    ends = {
        key[:-1]: key[-1]
        for key in zip(
            table.dp_rank[optimizer], table.stage[optimizer], table.step[optimizer],
            (table.start_s + table.duration_s)[optimizer], strict=True,
        )
    }  # fmt: skip
    names_of_values = ("step", "operation", "microbatch", "chunk", "start_ns", "duration_ns")
    columns: dict[str, list[int]] = {name: [] for name in names_of_values}
    ranks = []
    for row in np.flatnonzero(keep):
        name, key = str(names[row]), (table.dp_rank[row], table.stage[row], table.step[row])
        chunk, microbatch = int(table.chunk[row]), int(table.microbatch[row])
        if is_message[row]:
            chunk, microbatch = computes[name.split("-")[0] + "-compute", *key, table.sequence[row]]
        elif microbatch < 0:
            chunk = -1
        begin_s = table.start_s[row] + (ends[key] if name == "params-all-gather" else 0.0)
        start = BEGIN_NS + int(key[2]) * STEP_NS + round(begin_s * 1e9)
        values = (int(key[2]), _OPERATIONS[name].number, microbatch, chunk, start, round(table.duration_s[row] * 1e9))
        for column, value in zip(columns.values(), values, strict=True):
            column.append(int(value))
        ranks.append(int(table.rank[row]))
    for tp_rank in range(shape.tp_size):
        own = {"rank": [rank + tp_rank for rank in ranks], "launch_ns": columns["start_ns"]}
        parts.append(table_rows(Spans, {**columns, **own, "round": ROUND, "sequence": range(1, len(ranks) + 1)}))
    return joined(Spans, parts)


def who_ran(shape: JobShape) -> Ranks:
    """Return the row of each rank of an invented job."""
    layout = Layout(tp_size=shape.tp_size, cp_size=shape.dsp_size, pp_size=shape.pp_size, dp_size=shape.dp_size)
    return rank_rows(layout, ROUND, [f"host{rank // 2}" for rank in range(layout.world_size)])


def later(spans: Spans, rank: int, seconds: float) -> Spans:
    """Return the spans with the clock of one rank ahead."""
    return replace(spans, start_ns=np.where(spans.rank == rank, spans.start_ns + int(seconds * 1e9), spans.start_ns))
