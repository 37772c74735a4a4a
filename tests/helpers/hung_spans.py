"""Open spans of four ranks of which one never entered a collective: what a hung job streams."""

from __future__ import annotations

from megatrain.contracts.black_box.operations import Operation
from megatrain_diagnostics.events.tables import Groups, Spans, from_columns

LATE = 3


def group_of_four(round_number: int) -> Groups:
    """Return one group of all ranks."""
    return from_columns(
        Groups,
        {
            "round": [round_number] * 4, "rank": [0, 1, 2, 3], "group": [1] * 4, "first_rank": [0] * 4,
            "stride": [1] * 4, "num_ranks": [4] * 4, "name": ["dp"] * 4,
        },
    )  # fmt: skip


def open_spans(round_number: int) -> Spans:
    """Return spans of step 5: ranks 0 to 2 wait in the group's first collective, rank 3 computes."""
    return from_columns(
        Spans,
        {
            "round": [round_number] * 4, "rank": [0, 1, 2, LATE], "sequence": [1] * 4, "step": [5] * 4,
            "operation": [Operation.DP_ALL_REDUCE.number] * 3 + [Operation.FORWARD_COMPUTE.number],
            "microbatch": [0] * 4, "chunk": [0] * 4, "group": [1, 1, 1, 0], "collective": [1, 1, 1, 0],
            "start_ns": [10**18] * 4, "duration_ns": [-1] * 4, "launch_ns": [10**18] * 4, "num_bytes": [0] * 4,
            "flags": [0] * 4,
        },
    )  # fmt: skip
