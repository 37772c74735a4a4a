"""Places, peers and sizes along named axes, against numpy's own reshaping; and torchrun's variables."""

from __future__ import annotations

import itertools
import math
import pickle

import numpy as np
import pytest
from numpy.typing import NDArray

from megatrain.contracts.black_box.operations import Operation, all_reduce_along
from megatrain.contracts.errors import TopologyError
from megatrain.contracts.layout import AXES, FACTORIZATIONS, WITHIN_REPLICA, Layout
from megatrain.contracts.process import Process, process_from_environment

SIZES = (1, 2, 3)
LAYOUTS = [
    Layout(pp_size=pp, dp_size=dp, cp_size=cp, tp_size=tp, ep_size=ep)
    for pp, dp, cp, tp, ep in itertools.product(SIZES, repeat=5)
    if dp * cp * tp % ep == 0
]


def grids(layout: Layout) -> dict[str, tuple[NDArray[np.int64], int]]:
    """Return, for each axis, the ranks as an array and which of its dimensions the axis is."""
    ranks, found = np.arange(layout.world_size), {}
    for axes in FACTORIZATIONS.values():
        shape = [layout.size(axis) for axis in ("pp", *axes)]
        found |= {axis: (ranks.reshape(shape), place) for place, axis in enumerate(("pp", *axes))}
    return found


def test_places_and_peers_are_those_of_the_reshaped_ranks() -> None:
    for layout in LAYOUTS:
        for axis, (grid, dim) in grids(layout).items():
            for place in np.ndindex(grid.shape):
                rank = int(grid[place])
                assert layout.index(axis, rank) == place[dim], (layout, axis)
                line = grid[(*place[:dim], slice(None), *place[dim + 1 :])]
                assert layout.ranks_along(rank, axis) == tuple(line.tolist()), (layout, axis)


def test_a_layout_is_described_by_the_axes_that_cut_something() -> None:
    assert Layout().axes == Layout().grid == ("pp", "dp", "tp")
    both = Layout(pp_size=2, dp_size=2, cp_size=2, tp_size=2, ep_size=4)
    assert both.axes == ("pp", "dp", "cp", "tp", "edp", "ep")
    assert both.grid == ("pp", "dp", "cp", "tp")
    assert both.coordinate(13) == {"pp": 1, "dp": 1, "cp": 0, "tp": 1, "edp": 1, "ep": 1}
    assert both.place_text(13) == "stage 1, dp 1, cp 0, tp 1, edp 1, ep 1"
    assert str(both) == "pp_size=2 dp_size=2 cp_size=2 tp_size=2 ep_size=4"
    assert both.size("edp") == 2


def test_rank_of_coordinate_and_sizes_lead_back() -> None:
    for layout in LAYOUTS:
        assert [layout.rank_of(layout.coordinate(rank)) for rank in range(layout.world_size)] == list(
            range(layout.world_size)
        )
        assert Layout(**layout.sizes) == layout
        assert pickle.loads(pickle.dumps(layout)) == layout
    assert Layout(pp_size=3, tp_size=2).first_rank_of(2) == 4


def test_samples_are_assigned_along_dp_only() -> None:
    """Ranks along cp and tp share the samples of their dp rank, and so do the stages of a pipeline."""
    for layout in LAYOUTS:
        shares = [layout.sample_share(rank) for rank in range(layout.world_size)]
        assert layout.num_sample_parts == layout.dp_size
        assert shares == [(layout.index("dp", rank), layout.dp_size) for rank in range(layout.world_size)]


def test_number_of_replicas_follows_from_the_axes_within_one() -> None:
    for layout in LAYOUTS:
        ranks_per_replica = math.prod(layout.size(axis) for axis in WITHIN_REPLICA)
        assert ranks_per_replica * layout.dp_size == layout.world_size, layout


def test_a_coordinate_that_lacks_an_axis_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"the coordinate \{'pp': 1, 'tp': 1\} lacks dp of the layout pp_size=2"):
        Layout(pp_size=2, dp_size=2, tp_size=2).rank_of({"pp": 1, "tp": 1})
    with pytest.raises(TopologyError, match=r"dp 2 is outside the layout pp_size=2 dp_size=2"):
        Layout(pp_size=2, dp_size=2).rank_of({"pp": 1, "dp": 2, "tp": 0})


def test_ranks_along_several_axes() -> None:
    layout = Layout(pp_size=2, dp_size=2, cp_size=2, tp_size=2)
    assert layout.ranks_along(13, "dp", "cp") == (9, 11, 13, 15)
    assert layout.ranks_along(13, "dp", "cp", "tp") == tuple(range(8, 16))
    assert layout.ranks_along(13, "pp", "tp") == (4, 5, 12, 13)
    assert layout.ranks_along(13) == (13,)


def test_replicas_hold_what_no_axis_between_them_cuts() -> None:
    cases: list[tuple[Layout, tuple[str, ...], tuple[str, ...]]] = [
        (Layout(tp_size=4, pp_size=2), ("dp",), ()),
        (Layout(dp_size=2), ("dp",), ()),
        (Layout(cp_size=2), ("dp", "cp"), ()),
        (Layout(tp_size=4, ep_size=2), ("dp",), ("edp",)),
        (Layout(tp_size=4, ep_size=4), ("dp",), ("edp",)),
        (Layout(dp_size=2, cp_size=2, ep_size=2), ("dp", "cp"), ("edp",)),
    ]
    for layout, of_dense, of_experts in cases:
        assert layout.replica_axes("dp") == of_dense, layout
        assert layout.replica_axes("edp") == of_experts, layout
        together = [layout.ranks_along(0, *axes) for axes in (of_dense, of_experts)]
        assert layout.has_replicas == any(len(ranks) > 1 for ranks in together), layout


def test_impossible_layout_is_refused() -> None:
    for sizes, message in [
        ({"tp_size": 0}, r"parallel\.tp_size=0 must be at least 1"),
        ({"tp": 2}, r"has no size 'tp'=2; its sizes are pp_size, dp_size, cp_size, tp_size, ep_size"),
        ({"edp_size": 2}, r"has no size 'edp_size'=2"),
        ({"dp_size": 3, "ep_size": 2}, r"ep_size = 2 must divide the 3 ranks of a stage \(dp_size \* cp_size"),
    ]:
        with pytest.raises(TopologyError, match=message):
            raise AssertionError(f"accepted: {Layout(**sizes)}")


def test_a_rank_or_an_axis_that_is_not_there_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"rank 4 is outside the layout of 4 ranks \(pp_size=1 dp_size=4 tp_size=1"):
        Layout(dp_size=4).coordinate(4)
    with pytest.raises(TopologyError, match=r"no axis 'xp'; the axes are pp, dp, cp, tp, edp, ep"):
        Layout().size("xp")
    with pytest.raises(TopologyError, match=r"no axis 'xp'; the axes are pp, dp, cp, tp, edp, ep"):
        Layout().others_of("xp")
    with pytest.raises(TopologyError, match=r"the axis pp does not divide the ranks of a stage, unlike dp, cp, tp"):
        Layout(pp_size=2).replica_axes("pp")


def test_sum_group_of_each_axis_has_a_name() -> None:
    """For every axis that numbers ranks, because `Mesh.sum_over_all` looks it up."""
    grid = Layout(cp_size=2).grid
    assert {all_reduce_along(axis) for axis in grid} == {
        Operation.PP_ALL_REDUCE, Operation.DP_ALL_REDUCE, Operation.CP_ALL_REDUCE, Operation.TP_ALL_REDUCE
    }  # fmt: skip
    assert {axis.name for axis in AXES} >= set(grid)
    for axis in ("ep", "edp"):
        with pytest.raises(TopologyError, match=rf"no operation sums along '{axis}'; there are tp-all-reduce, dp-all-"):
            all_reduce_along(axis)


GOOD = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_alone_without_a_launcher() -> None:
    assert process_from_environment({"MASTER_ADDR": "node-0"}) == Process()


def test_rank_is_read_from_the_environment_of_torchrun() -> None:
    assert process_from_environment(GOOD) == Process(5, 8, 1, 4, 2, "env://", "node-0:29500", is_round_common=False)


COUNTED = {"MEGATRAIN_ROUND": "7", "MEGATRAIN_ROUND_COUNTER": "1484"}
READ: list[tuple[dict[str, str], str, object]] = [
    ({"MEGATRAIN_HOST": "host-3"}, "host", "host-3"),
    ({"MEGATRAIN_ROUND": "7"}, "round", 7),
    ({"MEGATRAIN_ROUND": ""}, "round", 2),  # torchrun counts
    (COUNTED, "round_counter", "1484"),
    (COUNTED | {"MEGATRAIN_ROUND": ""}, "round_counter", ""),
    ({"MEGATRAIN_ROUND": "7"}, "is_round_common", True),  # megatrain's launcher counts for all ranks
    ({"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}, "is_round_common", True),  # one agent has all workers
    ({"TORCHELASTIC_RESTART_COUNT": ""}, "is_round_common", True),
    ({"LOCAL_WORLD_SIZE": "", "TORCHELASTIC_RESTART_COUNT": ""}, "local_world_size", 2),
]
"""Changes of the environment, a field of the process, and its value."""


def test_optional_variables_are_read() -> None:
    for changes, name, value in READ:
        assert getattr(process_from_environment(GOOD | changes), name) == value, changes


def test_impossible_value_of_a_variable_is_named() -> None:
    for name, value in [
        ("RANK", "8"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("RANK", "\u0665"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "-2"),
        ("WORLD_SIZE", "9" * 5000),
        ("LOCAL_RANK", "8"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("MASTER_PORT", "abc"),
        ("MASTER_PORT", "99999"),
        ("TORCHELASTIC_RESTART_COUNT", "-1"),
        ("MEGATRAIN_ROUND", "x"),
    ]:
        rule = rf"^environment variable {name}='.*' must be a whole number from \d+ to \d+; "
        with pytest.raises(TopologyError, match=rule):
            raise AssertionError(f"{name}={value} is accepted: {process_from_environment(GOOD | {name: value})}")


def test_half_an_environment_is_refused() -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        with pytest.raises(TopologyError, match=rf"but not {name}; start workers with torchrun"):
            process_from_environment({key: value for key, value in GOOD.items() if key != name})
