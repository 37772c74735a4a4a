"""Open spans of four ranks of which one never entered a collective: what a hung job streams."""

from __future__ import annotations

from megatrain.contracts.black_box.operations import Operation
from megatrain_diagnostics.events.tables import Groups, Spans
from tests.helpers.table_rows import table_rows

LATE = 3


def group_of_four(round_number: int) -> Groups:
    """Return one group of all ranks."""
    columns = {"round": round_number, "rank": range(4), "group": 1, "stride": 1, "num_ranks": 4, "name": "dp"}
    return table_rows(Groups, columns)


def open_spans(round_number: int) -> Spans:
    """Return spans of step 5: ranks 0 to 2 wait in the group's first collective, rank 3 computes."""
    columns = {
        "round": round_number, "rank": [0, 1, 2, LATE], "sequence": 1, "step": 5,
        "operation": [Operation.DP_ALL_REDUCE.number] * 3 + [Operation.FORWARD_COMPUTE.number],
        "group": [1, 1, 1, 0], "collective": [1, 1, 1, 0], "start_ns": 10**18, "duration_ns": -1, "launch_ns": 10**18,
    }  # fmt: skip
    return table_rows(Spans, columns)
