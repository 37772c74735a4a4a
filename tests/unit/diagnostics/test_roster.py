"""The ranks of a round and their layout, with wrong rows and with cp and ep axes: rows, groups, places and names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatrain.contracts.black_box.operations import REPLICA_COLLECTIVES, Operation
from megatrain.contracts.errors import DataError
from megatrain.contracts.layout import Layout
from megatrain_diagnostics.analysis.drift_causes import groups_of
from megatrain_diagnostics.analysis.hang_grid import grid_lines, rank_letters
from megatrain_diagnostics.analysis.history import StepHistory
from megatrain_diagnostics.analysis.peers import Peers
from megatrain_diagnostics.analysis.sentences import place_of
from megatrain_diagnostics.analysis.stack_clusters import smallest_group
from megatrain_diagnostics.analysis.step_ring import WORK_KINDS, StepRow
from megatrain_diagnostics.analysis.timeline import rank_name
from megatrain_diagnostics.analysis.whatif.span_rows import Cells
from megatrain_diagnostics.events.roster import groups_along, make_roster, newest_round, places_along, replica_groups
from megatrain_diagnostics.events.tables import Ranks, joined, select
from tests.helpers.metric_readings import host_families, make_rank_reading
from tests.helpers.synthetic_steps import SyntheticJob, empty_groups

SENT = SyntheticJob(Layout(tp_size=2, dp_size=2)).ranks()


def test_majority_of_ranks_decides_the_layout() -> None:
    lie = np.where(SENT.rank == 3, 2**31 - 1, SENT.dp_size).astype(np.int32)
    roster = make_roster(replace(SENT, dp_size=lie), empty_groups(), 1)
    assert roster.layout == Layout(tp_size=2, dp_size=2)
    assert sorted(roster.hosts) == [0, 1, 2]
    stranger = replace(select(SENT, [0]), rank=np.array([9], dtype=np.int32))
    assert sorted(make_roster(joined(type(SENT), [SENT, stranger]), empty_groups(), 1).hosts) == [0, 1, 2, 3]


def test_a_rank_that_corrects_itself_counts_once() -> None:
    wrong = replace(SENT, dp_size=SENT.dp_size * 2, at_ns=SENT.at_ns - 5)
    assert make_roster(joined(type(SENT), [SENT, wrong]), empty_groups(), 1).layout.dp_size == 2


def test_layout_without_a_majority_is_an_error() -> None:
    split = np.where(SENT.rank < 2, 4, SENT.dp_size).astype(np.int32)
    with pytest.raises(DataError, match=r"different layouts .*\(1, 2, 1, 2, 1\), \(1, 4, 1, 2, 1\)"):
        make_roster(replace(SENT, dp_size=split), empty_groups(), 1)


def test_impossibly_large_layout_is_refused() -> None:
    """An untrusted directory must not make its reader build tables of two billion ranks."""
    with pytest.raises(DataError, match="no job is that large"):
        make_roster(replace(SENT, dp_size=np.full_like(SENT.dp_size, 2**31 - 1)), empty_groups(), 1)


def test_newest_round_is_reported_by_half_of_its_ranks() -> None:
    def ranks_of(round_number: int, count: int) -> Ranks:
        some = select(SENT, list(range(count)))
        return replace(some, round=np.full_like(some.round, round_number))

    assert newest_round(joined(Ranks, [SENT, ranks_of(6, 1)])) == 1
    assert newest_round(joined(Ranks, [SENT, ranks_of(2, 2), ranks_of(6, 1)])) == 2
    assert newest_round(joined(Ranks, [ranks_of(3, 1), ranks_of(2, 1)])) == 3


LAYOUT = Layout(pp_size=2, dp_size=2, cp_size=2, tp_size=2, ep_size=2)
ROSTER = SyntheticJob(LAYOUT, ranks_per_host=1).roster()
RANKS = np.arange(16)


def test_the_rows_of_ranks_give_the_layout() -> None:
    assert ROSTER.layout == LAYOUT


def test_places_and_groups_are_those_of_the_layout() -> None:
    for axis in LAYOUT.axes:
        expected = [LAYOUT.index(axis, rank) for rank in RANKS.tolist()]
        assert places_along(LAYOUT, axis).tolist() == expected, axis
    for axis in ("dp", "cp", "tp"):
        groups = groups_along(LAYOUT, axis)
        assert groups.shape == (2, 4, 2)
        for stage, of_stage in enumerate(groups.tolist()):
            for members in of_stage:
                assert tuple(members) == LAYOUT.ranks_along(members[0], axis), axis
                assert LAYOUT.index("pp", members[0]) == stage, axis
        assert sorted(groups.ravel().tolist()) == RANKS.tolist(), axis


def test_ranks_that_exchange_share_a_number() -> None:
    for operation, axes in (
        (Operation.TP_ALL_GATHER, ("tp",)), (Operation.GRADS_REDUCE_SCATTER, ("dp", "cp")),
        (Operation.FORWARD_RECV, ("pp",)),
    ):  # fmt: skip
        numbers = groups_of(operation, LAYOUT)
        for rank in RANKS.tolist():
            assert tuple(np.flatnonzero(numbers == numbers[rank])) == LAYOUT.ranks_along(rank, *axes), operation
    with pytest.raises(KeyError):
        groups_of(Operation.GC, LAYOUT)


def test_transfers_of_parameters_are_those_of_dp_and_cp_together() -> None:
    for members in replica_groups(LAYOUT).reshape(-1, 4).tolist():
        assert tuple(members) == LAYOUT.ranks_along(members[0], "dp", "cp")
    # the last rank to arrive waits least; 10 and 14, which are not along dp of it, wait for it too
    seconds = np.full((1, 16), 0.5)
    seconds[0, 12] = 0.1
    row = StepRow(
        step=1,
        operations=(Operation.GRADS_REDUCE_SCATTER.number,),
        seconds=seconds,
        longest=np.zeros((len(REPLICA_COLLECTIVES), 16)),
        num_forwards=np.ones(LAYOUT.world_size, dtype=np.int64),
        work=np.zeros((len(WORK_KINDS), 16)),
        has_reported=np.ones(16, dtype=bool),
    )
    history = StepHistory(LAYOUT, num_steps=1, num_first=1)
    history.add(row, Peers(ROSTER))
    assert history.window(1).dp_transfer_s[0].tolist() == [[0.5, 0.5], [0.1, 0.5]]


def test_a_rank_is_named_by_its_place_on_every_axis() -> None:
    assert place_of(13, ROSTER) == "rank 13 (stage 1, dp 1, cp 0, tp 1, edp 2, ep 1) on host-13"
    assert rank_name(ROSTER, 13) == "rank 13 pp=1 dp=1 cp=0 tp=1 edp=2 ep=1 host-13"


def test_the_smallest_group_of_outliers() -> None:
    for odd, kind, name in (
        ((8, 10), "cp", "cp group of stage 1, dp 0, tp 0"),
        ((8, 12), "dp", "dp group of stage 1, cp 0, tp 0"),
        ((2, 10), "pp", "pipeline of dp 0, cp 1, tp 0"),
        ((8, 9), "tp", "tp group of stage 1, dp 0, cp 0"),
        ((8, 10, 12), "edp", "edp group of stage 1, ep 0"),
        ((8, 11, 12), "stage", "stage 1"),
        ((3, 8), "replica", "dp 0"),
    ):
        found = smallest_group(odd, ROSTER)
        assert found is not None, odd
        assert (found.kind, found.name) == (kind, name)
        assert set(odd) <= set(found.ranks), odd


def test_outliers_of_one_replica_group_share_it() -> None:
    layout = Layout(pp_size=2, dp_size=2, cp_size=2, tp_size=2)
    found = smallest_group((8, 10, 12), SyntheticJob(layout, ranks_per_host=1).roster())
    assert found is not None
    assert (found.kind, found.name) == ("dp-cp", "dp-cp group of stage 1, tp 0")
    assert found.ranks == layout.ranks_along(8, "dp", "cp")


def test_drawn_grid_has_a_letter_for_each_rank() -> None:
    letters = rank_letters(LAYOUT, [13], [], [], [])
    assert grid_lines(LAYOUT, letters) == ["      pp 0  pp 1", "dp 0  ....  ....", "dp 1  ....  .X.."]


def test_a_cell_of_the_replay_is_a_stage_of_a_replica() -> None:
    cells = Cells(LAYOUT, np.array([7]), 1)
    found = cells.of_ranks(RANKS, np.full(16, 7))
    dp_rank, stage, _ = cells.places(found)
    assert dp_rank.tolist() == places_along(LAYOUT, "dp").tolist()
    assert stage.tolist() == places_along(LAYOUT, "pp").tolist()
    lines = cells.line(found, cells.tp_rank(RANKS))
    assert sorted(lines.tolist()) == list(range(cells.num_lines)) == RANKS.tolist()


def test_metrics_have_a_label_an_axis() -> None:
    ranks = tuple(replace(make_rank_reading(rank), place=LAYOUT.coordinate(rank)) for rank in (12, 13))
    found = host_families(ranks=ranks)["megatrain_rank_info"].samples[1].labels
    assert {axis: found[axis] for axis in LAYOUT.axes} == {
        "pp": "1", "dp": "1", "cp": "0", "tp": "1", "edp": "2", "ep": "1"
    }  # fmt: skip
