"""Who holds up a hanging job."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatrain.failures.hang import Confidence, Missing, Position, hang_suspects

DP = {"dp": [0, 1, 2, 3]}


def at(entered: int, finished: int) -> dict[str, Position]:
    return {"dp": Position(entered, finished)}


def test_the_rank_that_never_entered_is_the_suspect() -> None:
    report = hang_suspects({0: at(5, 4), 1: at(5, 4), 2: at(4, 4), 3: at(5, 4)}, DP)

    assert report.suspects == (2,)
    assert report.confidence is Confidence.CERTAIN
    assert report.missing == (Missing("dp", 5, waiting=(0, 1, 3), absent=(2,), silent=()),)
    assert report.reason == "rank 2 never entered collective 5 of dp, in which ranks 0, 1, 3 wait"
    assert report.waits_for == {0: (2,), 1: (2,), 3: (2,)}


def test_who_logs_nothing_is_the_suspect_when_all_others_wait() -> None:
    report = hang_suspects({0: at(5, 4), 1: at(5, 4), 3: at(5, 4)}, DP)

    assert (report.suspects, report.confidence, report.silent) == ((2,), Confidence.LIKELY, (2,))
    assert report.reason == "rank 2 logs nothing, and 3 ranks wait for it"


def test_a_rank_that_is_called_silent_is_one_whatever_it_said_before() -> None:
    report = hang_suspects({rank: at(5, 4) for rank in range(4)}, DP, silent=[1])

    assert report.suspects == (1,)


def test_a_victim_in_one_group_is_no_suspect_in_another() -> None:
    # rank 3 waits for rank 2 in its tensor group; rank 1 waits for rank 3 in the data group
    groups = {"tp": [2, 3], "dp": [1, 3]}
    positions = {
        1: {"dp": Position(8, 7)},
        2: {"tp": Position(40, 40)},
        3: {"tp": Position(41, 40), "dp": Position(7, 7)},
    }
    report = hang_suspects(positions, groups)

    assert (report.suspects, report.confidence) == ((2,), Confidence.CERTAIN)
    assert report.waits_for == {1: (3,), 3: (2,)}


def test_a_circle_is_a_disagreement_about_order() -> None:
    groups = {"a": [0, 1], "b": [0, 1]}
    positions = {
        0: {"a": Position(1, 0), "b": Position(0, 0)},
        1: {"a": Position(0, 0), "b": Position(1, 0)},
    }
    report = hang_suspects(positions, groups)

    assert (report.suspects, report.confidence) == ((0, 1), Confidence.WEAK)
    assert "different orders" in report.reason


def test_all_inside_one_collective_is_the_network_or_a_gpu() -> None:
    report = hang_suspects({rank: at(5, 4) for rank in range(4)}, DP)

    assert (report.suspects, report.confidence) == ((), Confidence.WEAK)
    assert "network" in report.reason


def test_nobody_waits() -> None:
    report = hang_suspects({rank: at(5, 5) for rank in range(4)}, DP)
    nothing = hang_suspects({}, DP)

    assert (report.suspects, report.confidence) == ((), Confidence.INSUFFICIENT)
    assert (nothing.confidence, nothing.silent) == (Confidence.INSUFFICIENT, (0, 1, 2, 3))


def test_several_collectives_of_one_group() -> None:
    # rank 1 is one behind, rank 0 has gone on: both of the others wait, in different collectives
    report = hang_suspects({0: at(6, 5), 1: at(5, 4), 2: at(4, 4), 3: at(5, 4)}, DP)

    assert report.suspects == (2,)
    assert [entry.sequence for entry in report.missing] == [5, 6]


@given(st.integers(2, 24), st.integers(0, 23), st.integers(0, 1000))
def test_one_late_rank_in_a_grid_is_always_found(num_ranks: int, late: int, step: int) -> None:
    # a grid of rows and columns: whoever waits for the late one in a row never enters its column's collective
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
