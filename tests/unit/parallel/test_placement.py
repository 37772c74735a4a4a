"""Placements by rows and layouts: the ranks' boxes are the parameter, and each value of the state is counted on one
rank."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from megatrain.comm.group_plan import planned_groups
from megatrain.contracts.errors import TopologyError
from megatrain.contracts.layout import Holders, Layout
from megatrain.parallel.boxes import Box, boxes_of_range
from megatrain.parallel.decoder import decoder_table
from megatrain.parallel.placement import (
    PIPELINE_ENDS,
    SOLE_HOLDER,
    Cut,
    Fused,
    Placement,
    PlacementRow,
    ShardHolders,
    placements_of,
    row_of,
    tensor_shape,
)

KV = PlacementRow("kv.weight", Cut("tp", 0, num_parts=2))
QKV = row_of("blocks.0.attention_branch.attention.qkv.weight", decoder_table())
EXPERTS = PlacementRow("experts.up", Cut("ep", 0), replica_axes=("edp",))
WORD = PlacementRow("embedding.word.weight", Cut("tp", 0), sum_groups=(PIPELINE_ENDS,))
EVERY_AXIS = Layout(pp_size=2, dp_size=2, cp_size=2, tp_size=2, ep_size=4)
CASES: dict[str, tuple[PlacementRow, tuple[int, ...], Layout, tuple[int, ...]]] = {
    "cut": (PlacementRow("w", Cut("tp", 1)), (6, 8, 3), Layout(tp_size=4, dp_size=2), (0,)),
    "whole": (PlacementRow("norm", sum_groups=("tp",)), (13,), Layout(tp_size=4, dp_size=3), (0,)),
    "whole on one tp rank": (PlacementRow("norm", sum_groups=("tp",)), (13,), Layout(dp_size=3), (0,)),
    "fewer parts than ranks": (KV, (2, 5, 3), Layout(tp_size=4, dp_size=2), (0,)),
    "as many parts as ranks": (KV, (4, 5), Layout(tp_size=2, dp_size=2), (0,)),
    "one part": (PlacementRow("kv", Cut("tp", 0, num_parts=1)), (4, 5), Layout(tp_size=4, dp_size=2), (0,)),
    "a key-value head a rank": (QKV, (4, 6, 2, 3), Layout(tp_size=4, dp_size=2), (0,)),
    "two ranks a key-value head": (QKV, (2, 6, 2, 3), Layout(tp_size=4, dp_size=2), (0,)),
    "one key-value head": (QKV, (1, 10, 3), Layout(tp_size=4, dp_size=3), (0,)),
    "experts within tp": (EXPERTS, (4, 2, 3), Layout(tp_size=4, dp_size=2, ep_size=2), (0,)),
    "experts across dp": (EXPERTS, (8, 2, 3), Layout(tp_size=2, dp_size=4, ep_size=4), (0,)),
    "experts over a stage": (EXPERTS, (8, 3), Layout(tp_size=2, pp_size=2, dp_size=2, ep_size=4), (1,)),
    "experts, with every axis": (EXPERTS, (8, 3), EVERY_AXIS, (1,)),
    "whole, with every axis": (PlacementRow("norm", sum_groups=("tp",)), (13,), EVERY_AXIS, (1,)),
    "state whole along cp": (PlacementRow("n", replica_axes=("dp",), sum_groups=("cp", "tp")), (13,), EVERY_AXIS, (1,)),
    "cut over tp, with every axis": (PlacementRow("w", Cut("tp", 0)), (8, 3), EVERY_AXIS, (1,)),
    "on both ends": (WORD, (6, 5), Layout(tp_size=2, pp_size=3, dp_size=2), (0, 2)),
}
"""Row, shape, layout and the stages that hold the parameter."""


HOLDERS = {
    "fewer parts than ranks": Holders("tp", 2),
    "one part": Holders("tp", 1),
    "two ranks a key-value head": Holders("tp", 2),
    "one key-value head": Holders("tp", 1),
}
"""The holders in the cases that need them."""


def placed(case: str) -> dict[int, tuple[Placement, ...]]:
    """Return the parts of all ranks that hold one."""
    row, shape, layout, stages = CASES[case]
    ranks = [rank for rank in range(layout.world_size) if layout.index("pp", rank) in stages]
    return {rank: placements_of(row.pattern, shape, row, layout, rank) for rank in ranks}


def boxes_of(case: str) -> list[tuple[int, Placement]]:
    """Return each rank's boxes, with the rank."""
    return [(rank, placement) for rank, placements in placed(case).items() for placement in placements]


def part_of(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


def shard_of(rank: int, placement: Placement, layout: Layout) -> tuple[int, int]:
    """Return the range of the flattened box whose state the rank has."""
    (replicas,) = (group.ranks for group in planned_groups(layout, rank) if group.name == placement.replica_group)
    index, count = replicas.index(rank), len(replicas)
    return placement.box.numel * index // count, placement.box.numel * (index + 1) // count


@pytest.mark.parametrize("case", CASES)
def test_placements_cover_the_parameter_and_its_state(case: str) -> None:
    _, shape, layout, _ = CASES[case]
    held, counted = np.zeros(shape, int), np.zeros(shape, int)
    holders = defaultdict(list)
    for rank, placement in boxes_of(case):
        shard = shard_of(rank, placement, layout)
        holders[placement.box, shard].append(placement.holders)
        if placement.holders.index == 0:
            for _, box in boxes_of_range(placement.box.sizes, *shard):
                shifted = box.shifted(placement.box.offsets)
                counted[part_of(shifted.offsets, shifted.sizes)] += 1
    for box in {placement.box for _, placement in boxes_of(case)}:
        assert held[part_of(box.offsets, box.sizes)].shape == box.sizes, "the box exceeds the tensor"
        held[part_of(box.offsets, box.sizes)] += 1
    assert (held == 1).all(), "the boxes tile the parameter"
    assert (counted == 1).all(), "each value of the state counts on one rank"
    for same in holders.values():  # the ranks with copies of a shard
        assert [one.index for one in same] == list(range(len(same)))
        assert {one.count for one in same} == {len(same)}
        assert len({one.groups for one in same}) == 1


@pytest.mark.parametrize("case", CASES)
def test_groups_and_tensors_are_those_of_the_placements(case: str) -> None:
    layout, found = CASES[case][2], placed(case)
    holders = [HOLDERS[case]] if case in HOLDERS else []
    for rank, placement in boxes_of(case):
        planned = planned_groups(layout, rank, holders=holders)
        ranks_of = {one.name: one.ranks for one in planned}
        replicas, same = ranks_of[placement.replica_group], placement.holders
        assert all(placement in found[replica] for replica in replicas)
        index, count = 0, 1
        for ranks in (ranks_of[group] for group in same.groups):
            index, count = index * len(ranks) + ranks.index(rank), count * len(ranks)
        assert (index, count) == (same.index, same.count)
    # The boxes of a rank are consecutive in its tensor.
    whole = np.arange(np.prod(CASES[case][1])).reshape(CASES[case][1])
    for placements in found.values():
        parts = [whole[part_of(one.box.offsets, one.box.sizes)] for one in placements]
        tensor = np.concatenate([part.ravel() for part in parts]).reshape(tensor_shape(placements))
        if len(parts) > 1:
            assert (tensor == np.concatenate(parts, axis=1)).all(), "matrices lie side by side along dim 1"
        else:
            assert (tensor == parts[0]).all()


def test_a_rank_has_the_queries_that_its_key_and_value_serve() -> None:
    queries, key_and_value = placed("two ranks a key-value head")[3]

    assert (queries.box, queries.holders) == (Box((1, 2, 0, 0), (1, 2, 2, 3)), SOLE_HOLDER)
    assert (key_and_value.box, key_and_value.holders) == (
        Box((1, 4, 0, 0), (1, 2, 2, 3)),
        ShardHolders(("tp-in-2",), 1, 2),
    )
    assert [len(placements) for placements in placed("a key-value head a rank").values()] == [1] * 8


def test_the_table_lists_the_state_of_each_rank() -> None:
    head = row_of("loss_head.weight", decoder_table(has_two_ends=True))
    layout = Layout(tp_size=2, pp_size=2)
    (copy,) = placements_of("loss_head.weight", (6, 5), head, layout, 3)

    assert (copy.name, copy.box.offsets, copy.box.sizes) == ("embedding.word.weight", (3, 0), (3, 5))
    assert (copy.replica_group, copy.holders) == ("dp", ShardHolders(("embedding",), 1, 2))
    (kv,), (experts,) = placed("fewer parts than ranks")[3], placed("experts across dp")[5]
    assert (kv.replica_group, kv.holders.groups) == ("dp", ("tp-in-2",))
    assert (experts.replica_group, experts.holders.groups) == ("edp", ())


@pytest.mark.parametrize(
    ("row", "shape", "tp_size", "problem"),
    [
        (PlacementRow("w", Cut("tp", 1)), (4, 6), 4, r"w of shape \[4, 6\] .* dim 1 in 4 parts for tp_size=4"),
        (KV, (4, 6), 3, r"dim 0 in 2 parts for tp_size=3"),
        (replace(KV, cut=Cut("tp", 0, num_parts=4)), (4, 6), 2, r"in 4 parts for tp_size=2"),
        (QKV, (2, 5, 7), 4, r"w: 2 ranks of a group of tp-in-2 split q, .* 2 must divide 3"),
        (QKV, (4, 5, 7), 6, r"w of shape .* in 4 parts for tp_size=6"),
    ],
)
def test_indivisible_parameter_is_refused(
    row: PlacementRow, shape: tuple[int, ...], tp_size: int, problem: str
) -> None:
    with pytest.raises(TopologyError, match=problem):
        placements_of("w", shape, row, Layout(tp_size=tp_size), 0)


@pytest.mark.parametrize(
    ("fused", "shape", "expected"),
    [
        (Fused(1, ("q", "k", "v")), (2, 6, 4, 16), {"q": (0, 4), "k": (4, 5), "v": (5, 6)}),
        (Fused(1, ("q", "k", "v")), (8, 3, 4), {"q": (0, 1), "k": (1, 2), "v": (2, 3)}),
        (Fused(0, ("gate", "up")), (2, 12, 16), {"gate": (0, 1), "up": (1, 2)}),
        (Fused(0, ("gate", "up")), (1, 12), {"up": (0, 1)}),
    ],
)
def test_fused_matrices_have_their_ranges(
    fused: Fused, shape: tuple[int, ...], expected: dict[str, tuple[int, int]]
) -> None:
    assert fused.ranges(shape) == expected
