"""The rank that holds up a job, from spans and activities: real layouts, thousands of ranks, and silent ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout
from megatrain_diagnostics.analysis.hang import (
    RankActivity,
    activities_of_spans,
    find_hang,
    group_key,
    roster_groups,
)
from megatrain_diagnostics.analysis.hang_grid import grid_lines, rank_letters
from megatrain_diagnostics.events.roster import GroupMembers, Roster
from megatrain_diagnostics.events.tables import NO_DURATION, Spans, columns_of, from_columns
from megatrain_job.failures.culprit import Culprit
from megatrain_job.failures.hang import Confidence, Position
from tests.helpers.work import assert_grows_linearly

TP, DP, PP = 1, 2, 3


def make_roster(layout: Layout, hosts_of: int = 8) -> Roster:
    """Return all ranks, eight a host, with their groups of three axes."""
    groups: dict[tuple[int, int], GroupMembers] = {}
    for rank in range(layout.world_size):
        for number, name, ranks in (
            (TP, "tp", layout.ranks_along(rank, "tp")),
            (DP, "dp", layout.ranks_along(rank, "dp")),
            (PP, "pp", layout.ranks_along(rank, "pp")),
        ):
            stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
            groups[rank, number] = GroupMembers(name, ranks[0], stride, len(ranks))
    hosts = {rank: f"host-{rank // hosts_of}" for rank in range(layout.world_size)}
    return Roster(1, layout, hosts, groups)


def key(roster: Roster, rank: int, group: int) -> str:
    return group_key(roster.groups[rank, group])


def make_spans(rows: list[Mapping[str, Any]]) -> Spans:
    """Return spans; a value that a row does not have is 0, and an open span has no duration."""
    base = {"round": 1, "microbatch": -1, "chunk": -1, "duration_ns": 10}
    return from_columns(
        Spans,
        {name: [{**base, "sequence": place + 1, **row}.get(name, 0) for place, row in enumerate(rows)]
         for name in columns_of(Spans)},
    )  # fmt: skip


def stuck(roster: Roster, late: int) -> dict[int, RankActivity]:
    """Return a job whose rank `late` never entered its tensor group: that group waits there, all others in dp."""
    row = set(roster.layout.ranks_along(late, "tp"))
    activities = {}
    for rank in range(roster.layout.world_size):
        is_in_row = rank in row
        tp = Position(7, 7) if rank == late or not is_in_row else Position(8, 7)
        dp = Position(5, 5) if is_in_row else Position(6, 5)
        positions = {key(roster, rank, TP): tp, key(roster, rank, DP): dp, key(roster, rank, PP): Position(3, 3)}
        activities[rank] = RankActivity(rank, positions, "forward-compute" if rank == late else "tp-all-gather", 9)
    return activities


@pytest.mark.slow
def test_late_rank_of_12288_is_found() -> None:
    roster = make_roster(Layout(tp_size=8, pp_size=8, dp_size=192))
    groups = roster_groups(roster)
    activities = stuck(roster, 7001)
    finding = find_hang(activities, groups, roster)

    (suspect,) = finding.suspects
    assert (suspect.rank, suspect.host, suspect.step, suspect.doing) == (7001, "host-875", 9, "forward-compute")
    assert suspect.place == {"pp": 4, "dp": 107, "tp": 1}
    assert suspect.evidence.startswith("never entered collective 8 of tp:7000+8x1")
    assert finding.report.confidence is Confidence.CERTAIN
    letters = rank_letters(roster.layout, [7001], [], finding.silent, finding.waiting)
    assert letters.count("X") == 1
    lines = grid_lines(roster.layout, letters)
    assert len(lines) <= 4, "equal replicas are one line"
    assert any("dp 107" in line and "wXwwwwww" in line for line in lines)


def test_twice_as_many_ranks_are_twice_the_work() -> None:
    def search(dp_size: int) -> Callable[[], object]:
        roster = make_roster(Layout(tp_size=8, pp_size=4, dp_size=dp_size))
        groups, activities = roster_groups(roster), stuck(roster, 101)
        return lambda: find_hang(activities, groups, roster)

    assert_grows_linearly(search, 12)


def test_a_rank_without_any_record_is_the_suspect_of_the_others() -> None:
    roster = make_roster(Layout(tp_size=2, pp_size=2, dp_size=2))
    activities = stuck(roster, 5)
    del activities[5]
    finding = find_hang(activities, roster_groups(roster), roster)

    assert [suspect.rank for suspect in finding.suspects] == [5]
    assert finding.suspects[0].evidence == "logs nothing"
    assert finding.report.confidence is Confidence.LIKELY
    assert finding.silent == {5}


def test_stopped_process_is_the_suspect() -> None:
    roster = make_roster(Layout(dp_size=4), hosts_of=2)
    activities = {rank: RankActivity(rank, {key(roster, rank, DP): Position(5, 4)}) for rank in range(4)}
    activities[3] = RankActivity(3, {key(roster, 3, DP): Position(5, 4)}, process_state="T")
    finding = find_hang(activities, roster_groups(roster), roster)

    assert ([suspect.rank for suspect in finding.suspects], finding.hosts) == ([3], ("host-1",))
    assert finding.report.confidence is Confidence.CERTAIN

    activities[3] = RankActivity(3, {key(roster, 3, DP): Position(4, 4)}, process_state="T")
    finding = find_hang(activities, roster_groups(roster), roster)

    assert {rank: tuple(others) for rank, others in finding.report.waits_for.items()} == {0: (3,), 1: (3,), 2: (3,)}
    assert finding.waiting == {0, 1, 2}
    assert finding.suspects[0].evidence == "is stopped (T); 3 waiting for it in collective 5 of dp:0+4x1"
    assert finding.report.reason == "rank 3 is stopped (T); ranks 0-2 wait for it in collective 5 of dp:0+4x1"


def test_culprit_of_the_incident_is_the_suspect() -> None:
    roster = make_roster(Layout(dp_size=4), hosts_of=2)
    activities = {rank: RankActivity(rank, {key(roster, rank, DP): Position(5, 4)}) for rank in range(4)}
    activities[0] = RankActivity(0, {key(roster, 0, DP): Position(4, 4)})
    recorded = Culprit((), ("host-1",), "host-1 is gone", incident="20260101-1")
    finding = find_hang(activities, roster_groups(roster), roster, recorded=recorded)

    assert ([suspect.rank for suspect in finding.suspects], finding.hosts) == ([2, 3], ("host-1",))
    assert (finding.culprit, finding.report.suspects) == (recorded, (0,))
    report = find_hang(activities, roster_groups(roster), roster, recorded=Culprit(reason="no rank is named"))
    assert report.suspects == ()


def test_positions_come_from_the_newest_exchange_of_each_group() -> None:
    roster = make_roster(Layout(dp_size=2, tp_size=2))
    rows = [
        {"rank": 0, "group": DP, "collective": place, "operation": Operation.DP_ALL_REDUCE.number}
        for place in (3, 4, 5)
    ]
    rows[2]["duration_ns"] = NO_DURATION
    rows.append({"rank": 0, "group": TP, "collective": 9, "operation": Operation.TP_ALL_GATHER.number})
    rows.append({"rank": 1, "group": TP, "collective": 8, "operation": Operation.TP_ALL_GATHER.number, "step": 4})
    rows.append({"rank": 1, "operation": Operation.DATA_WAIT.number, "duration_ns": NO_DURATION, "step": 4})
    rows.append({"rank": 1, "group": DP, "collective": 77, "round": 2})
    rows.append({"rank": 1, "group": 63, "collective": 5})  # A group that its table does not contain.
    found = activities_of_spans(make_spans(rows), roster)

    assert found[0].positions == {key(roster, 0, DP): Position(5, 4), key(roster, 0, TP): Position(9, 9)}
    assert (found[0].in_flight, found[0].is_busy) == ("dp-all-reduce", False)
    assert found[1].positions == {key(roster, 1, TP): Position(8, 8)}
    assert (found[1].in_flight, found[1].step, found[1].is_busy) == ("data-wait", 4, True)


def test_earlier_exchange_of_a_computing_rank_breaks_the_cycle() -> None:
    # rank 1 started a reduction and computes; rank 0 waits for its forward, and so does not enter the reduction
    roster = make_roster(Layout(dp_size=2, pp_size=1, tp_size=1))
    one, other = GroupMembers("dp", 0, 1, 2), GroupMembers("pp-forward", 1, -1, 2)
    roster = Roster(
        1, roster.layout, roster.hosts, {(rank, n): g for rank in (0, 1) for n, g in ((1, one), (2, other))}
    )
    rows: list[Mapping[str, Any]] = [
        {"rank": 1, "group": 1, "collective": 5, "duration_ns": NO_DURATION, "operation": 14},
        {"rank": 1, "operation": Operation.FORWARD_COMPUTE.number, "duration_ns": NO_DURATION},
        {"rank": 0, "group": 2, "collective": 8, "duration_ns": NO_DURATION, "operation": 6},
        {"rank": 0, "group": 1, "collective": 4, "operation": 14},
        {"rank": 1, "group": 2, "collective": 7, "operation": 5},
    ]
    rows.sort(key=lambda row: row.get("operation") == Operation.FORWARD_COMPUTE.number)
    finding = find_hang(activities_of_spans(make_spans(rows), roster), roster_groups(roster), roster)

    assert [suspect.rank for suspect in finding.suspects] == [1]
    assert finding.report.confidence is Confidence.LIKELY


def test_the_grid_has_a_letter_for_each_rank() -> None:
    for layout in (Layout(), Layout(dp_size=3), Layout(tp_size=2, pp_size=3, dp_size=2)):
        letters = rank_letters(layout, [0], [0, layout.world_size - 1, -1, 10**6], [], range(layout.world_size))
        lines = grid_lines(layout, letters)
        assert letters[0] == "X", layout
        assert len(letters) == layout.world_size
        assert len(lines[0].split("pp ")) == layout.pp_size + 1
        assert lines[1].split()[-layout.pp_size][0] == "X", layout
