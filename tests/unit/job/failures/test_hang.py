"""The rank that blocks a hung job."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatrain_job.failures.hang import Confidence, Missing, Position, hang_suspects, is_own_work

DP = {"dp": [0, 1, 2, 3]}


def at(entered: int, finished: int) -> dict[str, Position]:
    return {"dp": Position(entered, finished)}


def test_the_rank_that_never_entered_is_the_suspect() -> None:
    report = hang_suspects({0: at(5, 4), 1: at(5, 4), 2: at(4, 4), 3: at(5, 4)}, DP)

    assert report.suspects == (2,)
    assert report.confidence is Confidence.CERTAIN
    assert report.missing == (Missing("dp", 5, waiting=(0, 1, 3), absent=(2,), silent=()),)
    assert report.reason == "rank 2 never entered collective 5 of dp, in which ranks 0-1, 3 wait"
    assert report.waits_for == {0: (2,), 1: (2,), 3: (2,)}


def test_silent_rank_is_the_suspect_when_all_others_wait() -> None:
    report = hang_suspects({0: at(5, 4), 1: at(5, 4), 3: at(5, 4)}, DP)

    assert (report.suspects, report.confidence, report.silent) == ((2,), Confidence.LIKELY, (2,))
    assert report.reason == "rank 2 logs nothing, and 3 ranks wait for it"


def test_reported_silent_rank_counts_as_silent() -> None:
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


def test_hang_without_a_waiting_rank() -> None:
    report = hang_suspects({rank: at(5, 5) for rank in range(4)}, DP)
    nothing = hang_suspects({}, DP)

    assert (report.suspects, report.confidence) == ((), Confidence.INSUFFICIENT)
    assert (nothing.confidence, nothing.silent) == (Confidence.INSUFFICIENT, (0, 1, 2, 3))


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


def test_unawaited_exchange_delays_no_rank() -> None:
    # Rank 1 computes; its reduction is in progress, and rank 0, which waits for the result of rank 1, never entered it.
    groups = {"dp": [0, 1], "pp": [0, 1]}
    positions = {
        0: {"dp": Position(4, 4, awaited=0), "pp": Position(8, 7, awaited=8)},
        1: {"dp": Position(5, 4, awaited=0), "pp": Position(7, 7, awaited=7)},
    }
    report = hang_suspects(positions, groups)

    assert (report.suspects, report.confidence) == ((1,), Confidence.CERTAIN)
    unsaid = {
        rank: {group: Position(p.entered, p.finished) for group, p in at.items()} for rank, at in positions.items()
    }
    assert hang_suspects(unsaid, groups).confidence is Confidence.WEAK


def test_rank_that_entered_without_waiting_is_the_suspect() -> None:
    positions = {rank: {"dp": Position(5, 4, awaited=5)} for rank in range(4)} | {2: {"dp": Position(5, 4, awaited=4)}}
    report = hang_suspects(positions, DP)

    assert (report.suspects, report.confidence) == ((2,), Confidence.LIKELY)
    assert report.missing == (Missing("dp", 5, waiting=(0, 1, 3), absent=(), silent=(), not_waiting=(2,)),)
    assert "rank 2 entered collective 5 of dp and went on to something else" in report.reason


def test_victims_in_a_complete_collective_are_not_blamed() -> None:
    # ranks 0 and 1 are inside one together; rank 2 waits for both of them elsewhere
    groups = {"tp": [0, 1], "dp": [0, 2]}
    positions = {
        0: {"tp": Position(9, 8, awaited=9), "dp": Position(3, 3, awaited=0)},
        1: {"tp": Position(9, 8, awaited=9)},
        2: {"dp": Position(4, 3, awaited=4)},
    }
    report = hang_suspects(positions, groups)

    assert (report.suspects, report.confidence) == ((), Confidence.WEAK)
    assert "collective 9 of tp" in report.reason


def test_reason_is_the_collective_with_the_fewest_suspects() -> None:
    groups = {"a": [0, 1, 2, 3], "b": [2, 3]}
    positions = {
        0: {"a": at(5, 4)["dp"]},
        1: {"a": at(5, 4)["dp"]},
        2: {"a": at(4, 4)["dp"], "b": at(7, 6)["dp"]},
        3: {"a": at(4, 4)["dp"], "b": at(6, 6)["dp"]},
    }
    report = hang_suspects(positions, groups)

    assert report.suspects == (3,)
    assert report.reason == "rank 3 never entered collective 7 of b, in which rank 2 waits"


def test_busy_rank_breaks_a_cycle_of_waits() -> None:
    # Rank 1 reads data; its earlier launch waits on its device for rank 0, which waits for rank 1's next launch.
    groups = {"dp": [0, 1], "pp": [0, 1]}
    positions = {
        0: {"dp": Position(4, 4, awaited=0), "pp": Position(8, 7, awaited=8)},
        1: {"dp": Position(5, 4, awaited=5), "pp": Position(7, 7, awaited=0)},
    }
    assert hang_suspects(positions, groups).confidence is Confidence.WEAK
    report = hang_suspects(positions, groups, busy=[1])
    assert (report.suspects, report.confidence) == ((1,), Confidence.LIKELY)
    # If the counts decide, the activity of a rank changes nothing: the last stage waits for a sum within its forward.
    plain = {0: {"dp": Position(4, 4, awaited=4)}, 1: {"dp": Position(5, 4, awaited=5)}}
    assert hang_suspects(plain, {"dp": [0, 1]}, busy=[1]).suspects == (0,)


def test_own_work_waits_for_no_rank() -> None:
    for name in ("data-wait", "forward-compute", "optimizer", "gc", "checkpoint"):
        assert is_own_work(name)
    for name in ("", "step", "clip", "barrier", "evaluation", "dp-all-reduce", "forward-recv", "operation-60"):
        assert not is_own_work(name)


def test_stopped_process_in_a_collective_is_no_network_fault() -> None:
    inside = {rank: at(5, 4) for rank in range(4)}
    report = hang_suspects(inside, DP, states={0: "S", 2: "T", 3: "D"})
    assert (report.suspects, report.confidence) == ((2,), Confidence.CERTAIN)
    assert report.reason == "rank 2 is stopped (T); ranks 0-1, 3 wait for it in collective 5 of dp"
    assert dict(report.waits_for) == {0: (2,), 1: (2,), 3: (2,)}
    assert report.missing == (Missing("dp", 5, waiting=(0, 1, 3), absent=(), silent=(), not_waiting=(2,)),)


def test_dead_process_is_blamed_not_the_ranks_that_wait() -> None:
    # Rank 1 never entered the reduction, because it waits for rank 0, whose process is gone.
    groups = {"dp": [1, 2], "tp": [0, 1]}
    positions = {0: {"tp": at(7, 7)["dp"]}, 1: {"tp": at(8, 7)["dp"], "dp": at(4, 4)["dp"]}, 2: at(5, 4)}
    report = hang_suspects(positions, groups, states={0: ""})
    assert report.suspects == (0,)
    assert report.reason == "rank 0 has no process; rank 1 waits for it in collective 8 of tp"


def test_many_stopped_processes_are_reported_briefly() -> None:
    report = hang_suspects(
        {rank: at(5, 4) for rank in range(20)}, {"dp": range(20)}, states=dict.fromkeys(range(20), "T")
    )
    assert report.suspects == tuple(range(20))
    assert "rank 7 is stopped (T); 12 more cannot run either" in report.reason
