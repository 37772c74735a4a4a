"""The rank that blocks a hung job."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_job.failures.hang import Confidence, Missing, Position, hang_suspects, is_own_work

DP = {"dp": [0, 1, 2, 3]}
CERTAIN, LIKELY, WEAK = Confidence.CERTAIN, Confidence.LIKELY, Confidence.WEAK


def at(entered: int, finished: int) -> dict[str, Position]:
    return {"dp": Position(entered, finished)}


INSIDE = {rank: at(5, 4) for rank in range(4)}
UNAWAITED = {
    0: {"dp": Position(4, 4, awaited=0), "pp": Position(8, 7, awaited=8)},
    1: {"dp": Position(5, 4, awaited=0), "pp": Position(7, 7, awaited=7)},
}
BUSY = {
    0: {"dp": Position(4, 4, awaited=0), "pp": Position(8, 7, awaited=8)},
    1: {"dp": Position(5, 4, awaited=5), "pp": Position(7, 7, awaited=0)},
}
BOTH = {"dp": [0, 1], "pp": [0, 1]}
CASES: dict[str, tuple[dict[int, dict[str, Position]], dict[str, list[int]], dict[str, Any], dict[str, Any]]] = {
    "a rank never entered": (
        INSIDE | {2: at(4, 4)}, DP, {},
        {
            "suspects": (2,), "confidence": CERTAIN, "waits_for": {0: (2,), 1: (2,), 3: (2,)},
            "missing": (Missing("dp", 5, waiting=(0, 1, 3), absent=(2,), silent=()),),
            "reason": "rank 2 never entered collective 5 of dp, in which ranks 0-1, 3 wait",
        },
    ),
    "a silent rank, and all others wait": (
        {0: at(5, 4), 1: at(5, 4), 3: at(5, 4)}, DP, {},
        {
            "suspects": (2,), "confidence": LIKELY, "silent": (2,),
            "reason": "rank 2 logs nothing, and 3 ranks wait for it",
        },
    ),
    "a rank that is reported as silent": (INSIDE, DP, {"silent": [1]}, {"suspects": (1,)}),
    # rank 3 waits for rank 2 in its tensor group; rank 1 waits for rank 3 in the data group
    "a victim in one group is no suspect in another": (
        {1: at(8, 7), 2: {"tp": Position(40, 40)}, 3: {"tp": Position(41, 40), **at(7, 7)}},
        {"tp": [2, 3], "dp": [1, 3]}, {},
        {"suspects": (2,), "confidence": CERTAIN, "waits_for": {1: (3,), 3: (2,)}},
    ),
    "a circle is a disagreement about the order": (
        {0: {"a": Position(1, 0), "b": Position(0, 0)}, 1: {"a": Position(0, 0), "b": Position(1, 0)}},
        {"a": [0, 1], "b": [0, 1]}, {},
        {"suspects": (0, 1), "confidence": WEAK, "says": "different orders"},
    ),
    "all are inside one collective": (INSIDE, DP, {}, {"suspects": (), "confidence": WEAK, "says": "network"}),
    "no rank waits": (
        {rank: at(5, 5) for rank in range(4)}, DP, {}, {"suspects": (), "confidence": Confidence.INSUFFICIENT}
    ),
    "nothing is known": ({}, DP, {}, {"confidence": Confidence.INSUFFICIENT, "silent": (0, 1, 2, 3)}),
    # rank 1 computes; its reduction is in progress, and rank 0, which waits for its result, never entered the reduction
    "an exchange that no rank awaits": (UNAWAITED, BOTH, {}, {"suspects": (1,), "confidence": CERTAIN}),
    "an exchange without awaited sequences": (
        {rank: {group: Position(p.entered, p.finished) for group, p in one.items()} for rank, one in UNAWAITED.items()},
        BOTH, {}, {"confidence": WEAK},
    ),
    "a rank entered without waiting": (
        {rank: {"dp": Position(5, 4, awaited=5 - (rank == 2))} for rank in range(4)}, DP, {},
        {
            "suspects": (2,), "confidence": LIKELY,
            "missing": (Missing("dp", 5, waiting=(0, 1, 3), absent=(), silent=(), not_waiting=(2,)),),
            "says": "rank 2 entered collective 5 of dp and went on to something else",
        },
    ),
    # ranks 0 and 1 are inside one together; rank 2 waits for both of them elsewhere
    "victims inside a complete collective": (
        {
            0: {"tp": Position(9, 8, awaited=9), "dp": Position(3, 3, awaited=0)},
            1: {"tp": Position(9, 8, awaited=9)}, 2: {"dp": Position(4, 3, awaited=4)},
        },
        {"tp": [0, 1], "dp": [0, 2]}, {}, {"suspects": (), "confidence": WEAK, "says": "collective 9 of tp"},
    ),
    "the collective with the fewest suspects is the reason": (
        {
            0: {"a": Position(5, 4)}, 1: {"a": Position(5, 4)},
            2: {"a": Position(4, 4), "b": Position(7, 6)}, 3: {"a": Position(4, 4), "b": Position(6, 6)},
        },
        {"a": [0, 1, 2, 3], "b": [2, 3]}, {},
        {"suspects": (3,), "reason": "rank 3 never entered collective 7 of b, in which rank 2 waits"},
    ),
    # rank 1 reads data; its earlier launch waits on its device for rank 0, which waits for rank 1's next launch
    "a cycle of waits": (BUSY, BOTH, {}, {"confidence": WEAK}),
    "a busy rank breaks the cycle": (BUSY, BOTH, {"busy": [1]}, {"suspects": (1,), "confidence": LIKELY}),
    # the last stage waits for a sum within its forward
    "the counts decide before the activity": (
        {0: {"dp": Position(4, 4, awaited=4)}, 1: {"dp": Position(5, 4, awaited=5)}}, {"dp": [0, 1]}, {"busy": [1]},
        {"suspects": (0,)},
    ),
    "a stopped process inside of a collective": (
        INSIDE, DP, {"states": {0: "S", 2: "T", 3: "D"}},
        {
            "suspects": (2,), "confidence": CERTAIN, "waits_for": {0: (2,), 1: (2,), 3: (2,)},
            "missing": (Missing("dp", 5, waiting=(0, 1, 3), absent=(), silent=(), not_waiting=(2,)),),
            "reason": "rank 2 is stopped (T); ranks 0-1, 3 wait for it in collective 5 of dp",
        },
    ),
    # rank 1 never entered the reduction, because it waits for rank 0, whose process is gone
    "a dead process is blamed, not the ranks that wait": (
        {0: {"tp": Position(7, 7)}, 1: {"tp": Position(8, 7), **at(4, 4)}, 2: at(5, 4)},
        {"dp": [1, 2], "tp": [0, 1]}, {"states": {0: ""}},
        {"suspects": (0,), "reason": "rank 0 has no process; rank 1 waits for it in collective 8 of tp"},
    ),
    "many stopped processes": (
        {rank: at(5, 4) for rank in range(20)}, {"dp": list(range(20))}, {"states": dict.fromkeys(range(20), "T")},
        {"suspects": tuple(range(20)), "says": "rank 7 is stopped (T); 12 more cannot run either"},
    ),
}  # fmt: skip
"""Positions, groups, further arguments, and what the report has; `says`: a part of its reason."""


@pytest.mark.parametrize("name", CASES)
def test_report_of_a_hang_follows_from_the_positions(name: str) -> None:
    positions, groups, more, expected = CASES[name]
    report = hang_suspects(positions, groups, **more)

    assert expected.get("says", "") in report.reason
    fields = expected.keys() - {"says"}
    assert {field: getattr(report, field) for field in fields} == {field: expected[field] for field in fields}


def test_several_collectives_of_one_group() -> None:
    # Rank 1 is one behind, rank 0 has continued: both of the others wait, in different collectives.
    report = hang_suspects({0: at(6, 5), 1: at(5, 4), 2: at(4, 4), 3: at(5, 4)}, DP)

    assert report.suspects == (2,)
    assert [entry.sequence for entry in report.missing] == [5, 6]


@given(st.integers(2, 24), st.integers(0, 23), st.integers(0, 1000))
def test_late_rank_in_a_grid_is_found(num_ranks: int, late: int, step: int) -> None:
    # A grid of rows and columns: a rank that waits for the late one in a row never enters its column's collective.
    late %= num_ranks
    width = 4
    groups = {f"row{row}": range(row, min(row + width, num_ranks)) for row in range(0, num_ranks, width)}
    groups |= {f"column{column}": range(column, num_ranks, width) for column in range(min(width, num_ranks))}
    row = late // width * width
    positions = {}
    for rank in range(num_ranks):
        is_in_row = rank // width * width == row
        in_row = Position(step, step) if rank == late or not is_in_row else Position(step + 1, step)
        is_waiting = not is_in_row and rank % width in {other % width for other in groups[f"row{row}"]}
        in_column = Position(step + 1, step) if is_waiting else Position(step, step)
        positions[rank] = {f"row{rank // width * width}": in_row, f"column{rank % width}": in_column}
    report = hang_suspects(positions, groups)

    if len(groups[f"row{row}"]) > 1 or len(groups[f"column{late % width}"]) > 1:
        assert report.suspects == (late,)
        assert report.confidence is Confidence.CERTAIN


def test_own_work_waits_for_no_rank() -> None:
    for name in ("data-wait", "forward-compute", "optimizer", "gc", "checkpoint"):
        assert is_own_work(name)
    for name in ("", "step", "clip", "barrier", "evaluation", "dp-all-reduce", "forward-recv", "operation-60"):
        assert not is_own_work(name)
