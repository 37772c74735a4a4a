"""Buckets: how parameters are grouped, and that the shards of all ranks together are the parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megatrain.comm.dry import dry_mesh
from megatrain.comm.group import Group
from megatrain.contracts.errors import TopologyError
from megatrain.contracts.layout import Layout
from megatrain.parallel.boxes import Box
from megatrain.parallel.bucket import SHARD_MULTIPLE, Bucket, ShardSlice, group_into_buckets
from megatrain.parallel.decoder import decoder_table
from megatrain.parallel.placement import (
    SOLE_HOLDER,
    Cut,
    Placement,
    PlacementRow,
    ShardHolders,
    placements_of,
    row_of,
    tensor_shape,
)
from megatrain.parallel.sharding import LogicalParameter
from tests.helpers.single_rank import simulated_group
from tests.helpers.single_rank_buckets import held_whole

CPU = torch.device("cpu")


def logical(
    name: str,
    *shape: int,
    tp_size: int = 1,
    tp_rank: int = 0,
    holders: ShardHolders = SOLE_HOLDER,
    replica_group: str = "dp",
) -> LogicalParameter:
    """Return a parameter on meta; with tp_size > 1 its first dim is a part of the whole."""
    box = Box((shape[0] * tp_rank, *[0] * (len(shape) - 1)), shape)
    placement = Placement(name, (shape[0] * tp_size, *shape[1:]), box, replica_group, holders)
    return LogicalParameter(nn.Parameter(torch.empty(shape, device="meta")), (placement,))


def build(parameters: Sequence[LogicalParameter], *groups: Group, dtype: torch.dtype = torch.float32) -> Bucket:
    by_name = {group.name: group for group in groups}
    return Bucket(parameters, by_name, dtype=dtype, gradient_dtype=torch.float32, device=CPU)


def fill(bucket: Bucket) -> None:
    """Give every element of every parameter a different number, through the parameters."""
    with torch.no_grad():
        first = 1
        for parameter in bucket.parameters:
            numel = parameter.parameter.numel()
            parameter.parameter.copy_(torch.arange(first, first + numel).view(parameter.parameter.shape))
            first += numel


SHAPES = [(3, 5), (7,), (2, 3, 4), (1,), (40, 10)]


def parameters(shapes: Sequence[tuple[int, ...]]) -> list[LogicalParameter]:
    return [logical(f"p{number}", *shape) for number, shape in enumerate(shapes)]


def test_shards_are_equal_aligned_and_cover_the_bucket() -> None:
    for dp_size in (1, 2, 3, 8):
        buckets = [build(parameters(SHAPES), simulated_group("dp", dp_size, rank)) for rank in range(dp_size)]
        numel = sum(parameter.parameter.numel() for parameter in buckets[0].parameters)
        for rank, bucket in enumerate(buckets):
            length, shard = bucket.shard_numel, bucket.shard
            assert length % SHARD_MULTIPLE == 0, dp_size
            assert bucket.numel == dp_size * length == bucket.values.numel(), dp_size
            assert numel <= bucket.numel < numel + dp_size * SHARD_MULTIPLE, dp_size
            assert (shard.start, shard.stop) == (rank * length, (rank + 1) * length), dp_size


def test_exact_fit_needs_no_padding() -> None:
    assert build(parameters([(SHARD_MULTIPLE,), (2, SHARD_MULTIPLE // 2)]), simulated_group("dp", 2, 0)).numel == 256


def test_padding_of_gradients_is_zero_whatever_the_memory_held(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = build(parameters([(40, 10), (3,)]), simulated_group("dp", 2, 0))
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, math.nan, **options))
    bucket.allocate_gradients()
    assert bucket.gradients is not None
    padding = bucket.gradients[403:]
    assert padding.tolist() == [0.0] * (bucket.numel - 403)
    assert len(padding) > 0


def test_parameters_become_views_and_stay_the_same_objects() -> None:
    module = nn.Linear(3, 5, device="meta")
    weight, bias = module.weight, module.bias
    both = [held_whole("weight", weight), held_whole("bias", bias)]
    bucket = build(both, simulated_group("dp", 1, 0), dtype=torch.bfloat16)
    bucket.values.copy_(torch.arange(bucket.numel))

    assert module.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight.dtype == torch.bfloat16
    assert weight.device == CPU
    assert torch.equal(weight.detach(), torch.arange(15).view(5, 3).bfloat16())
    assert torch.equal(bias.detach(), torch.arange(15, 20).bfloat16())
    assert not bucket.values[20:].sub(torch.arange(20, 128)).any()
    module(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    assert weight.grad is not None


@settings(max_examples=30)
@given(
    shapes=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5),
    dp_size=st.sampled_from([1, 2, 3, 4, 8]),
)
def test_shards_of_all_ranks_are_the_parameters(shapes: Any, dp_size: int) -> None:
    rebuilt: dict[str, Tensor] = {}
    for rank in range(dp_size):
        bucket = build(parameters(shapes), simulated_group("dp", dp_size, rank))
        fill(bucket)
        flat = bucket.values[bucket.shard]
        for shard in bucket.flat_shards(flat):
            whole = rebuilt.setdefault(shard.name, torch.zeros(shard.global_shape))
            part = tuple(
                slice(first, first + size) for first, size in zip(shard.box.offsets, shard.box.sizes, strict=True)
            )
            assert (whole[part] == 0).all(), "an element is in two shards"
            whole[part] = shard.tensor
            assert shard.tensor.untyped_storage().data_ptr() == bucket.values.untyped_storage().data_ptr()

    for parameter in bucket.parameters:
        assert torch.equal(rebuilt[parameter.name], parameter.parameter.detach())
    assert rebuilt.keys() == {parameter.name for parameter in bucket.parameters}


@pytest.mark.parametrize("dp_size", [1, 2, 5])
def test_segments_are_the_parameters_without_the_padding(dp_size: int) -> None:
    found: dict[str, list[Tensor]] = {}
    num_elements = 0
    for rank in range(dp_size):
        bucket = build(parameters(SHAPES), simulated_group("dp", dp_size, rank))
        fill(bucket)
        flat = bucket.values[bucket.shard]
        for segment in bucket.segments():
            assert 0 <= segment.start < segment.stop <= bucket.shard_numel
            pieces = found.setdefault(segment.logical.name, [])
            assert segment.box_start == sum(piece.numel() for piece in pieces)
            pieces.append(flat[segment.start : segment.stop])
            num_elements += segment.stop - segment.start

    assert num_elements == sum(parameter.parameter.numel() for parameter in bucket.parameters)
    for parameter in bucket.parameters:
        assert torch.equal(torch.cat(found[parameter.name]), parameter.parameter.detach().flatten())


def test_parameter_that_ends_with_a_shard_is_not_in_the_next() -> None:
    shapes = [(SHARD_MULTIPLE,), (SHARD_MULTIPLE,)]
    for rank in range(2):
        (segment,) = build(parameters(shapes), simulated_group("dp", 2, rank)).segments()
        assert (segment.logical.name, segment.start, segment.stop) == (f"p{rank}", 0, SHARD_MULTIPLE)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_shards_of_tensor_parallel_ranks_lie_in_the_whole(dp_size: int) -> None:
    whole = torch.zeros(12, 50)
    for tp_rank in range(4):
        for dp_rank in range(dp_size):
            one = logical("w", 3, 50, tp_size=4, tp_rank=tp_rank)
            bucket = build([one], simulated_group("dp", dp_size, dp_rank))
            with torch.no_grad():
                one.parameter.copy_(torch.arange(600).view(12, 50)[3 * tp_rank : 3 * tp_rank + 3] + 1)
            for shard in bucket.flat_shards(bucket.values[bucket.shard]):
                assert shard.global_shape == (12, 50)
                (row, column), (rows, columns) = shard.box.offsets, shard.box.sizes
                whole[row : row + rows, column : column + columns] += shard.tensor

    assert torch.equal(whole, torch.arange(600).view(12, 50) + 1.0)


def names(buckets: list[list[LogicalParameter]]) -> list[list[str]]:
    return [[one.name for one in bucket] for bucket in buckets]


def test_buckets_are_filled_from_the_last_parameter() -> None:
    forward_order = [logical(name, 10) for name in "abcdefg"]

    assert names(group_into_buckets(forward_order, 20)) == [["g", "f"], ["e", "d"], ["c", "b"], ["a"]]
    assert names(group_into_buckets(forward_order, 21)) == [["g", "f", "e"], ["d", "c", "b"], ["a"]]
    assert names(group_into_buckets(forward_order, 1)) == [[name] for name in "gfedcba"]
    assert names(group_into_buckets(forward_order, 10**9)) == [list("gfedcba")]


def test_large_parameter_closes_its_bucket() -> None:
    forward_order = [logical("a", 5), logical("big", 1000), logical("b", 5)]

    assert names(group_into_buckets(forward_order, 100)) == [["b", "big"], ["a"]]


def test_parameters_of_different_groups_never_share_a_bucket() -> None:
    over_tp = ShardHolders(("tp",), 0, 2)
    forward_order = [
        logical("tied", 10, holders=ShardHolders(("embedding",), 0, 2)),
        logical("norm1", 10, holders=over_tp),
        logical("w1", 10),
        logical("experts1", 10, replica_group="edp"),
        logical("norm2", 10, holders=over_tp),
        logical("w2", 10),
        logical("experts2", 10, replica_group="edp"),
    ]
    buckets = group_into_buckets(forward_order, 10**9)

    assert sorted(names(buckets)) == [["experts2", "experts1"], ["norm2", "norm1"], ["tied"], ["w2", "w1"]]


def test_a_bucket_has_the_groups_of_its_parameters() -> None:
    dp, edp, tp = (simulated_group(name, size, 1) for name, size in (("dp", 2), ("edp", 4), ("tp", 2)))
    experts = build([logical("experts", 10, replica_group="edp")], dp, edp, tp)
    norm = build([logical("norm", 10, holders=ShardHolders(("tp",), 1, 2))], dp, edp, tp)

    assert (experts.replicas, experts.sum_groups) == (edp, ())
    assert (norm.replicas, norm.sum_groups) == (dp, (tp,))
    assert experts.shard_slices() == [ShardSlice(0, SHARD_MULTIPLE, SOLE_HOLDER)]
    assert norm.shard_slices() == [ShardSlice(0, SHARD_MULTIPLE, ShardHolders(("tp",), 1, 2))]
    assert experts.shard == slice(SHARD_MULTIPLE, 2 * SHARD_MULTIPLE)
    assert (experts.numel, norm.numel) == (4 * SHARD_MULTIPLE, 2 * SHARD_MULTIPLE)


@pytest.mark.parametrize(
    ("row", "group"),
    [
        # The axis is listed only with ep_size above 1.
        (PlacementRow("experts", Cut("ep", 0), replica_axes=("edp",)), "edp"),
        (PlacementRow("experts", sum_groups=("ep",)), "ep"),
    ],
    ids=["replicas", "sum"],
)
def test_gradient_over_a_group_that_does_not_exist_is_refused(row: PlacementRow, group: str) -> None:
    layout = Layout(dp_size=2, tp_size=2)
    experts = LogicalParameter(nn.Parameter(torch.empty(4, 8)), placements_of("experts", (4, 8), row, layout, 0))
    with dry_mesh(layout, 0) as mesh, pytest.raises(TopologyError) as refused:
        build([experts], *mesh.by_name.values())

    message = (
        f"the gradient of experts is summed over the group {group}, and this layout has only pp, dp, tp, embedding:"
    )
    assert message in str(refused.value)


@pytest.mark.parametrize("dp_size", [1, 2, 5])
def test_a_shard_is_slices_of_values_with_the_same_holders(dp_size: int) -> None:
    row = row_of("blocks.0.attention_branch.attention.qkv.weight", decoder_table())
    layout, holders = Layout(tp_size=4), ShardHolders(("tp-in-2",), 1, 2)
    shapes = {"first": (2, 6, 5, 7), "second": (2, 6, 11)}
    placements = {name: placements_of(name, shape, row, layout, 3) for name, shape in shapes.items()}
    groups = [simulated_group("tp-in-2", 2, 1)]
    is_shared = []
    for dp_rank in range(dp_size):
        members = [
            LogicalParameter(nn.Parameter(torch.empty(tensor_shape(placement), device="meta")), placement)
            for placement in placements.values()
        ]
        bucket = build(members, simulated_group("dp", dp_size, dp_rank), *groups)
        slices = bucket.shard_slices()
        assert [0, *(one.stop for one in slices)] == [*(one.start for one in slices), bucket.shard_numel]
        for one in slices:
            is_shared += [one.holders == holders] * (one.stop - one.start)
        shards = [shard.holders for shard in bucket.flat_shards(bucket.values[bucket.shard])]
        assert set(shards) <= {holders, SOLE_HOLDER}

    # of each tensor its own two queries, then key and value; padding has no other holder
    expected = [False] * 70 + [True] * 70 + [False] * 22 + [True] * 22
    assert is_shared == expected + [False] * (len(is_shared) - len(expected))


@settings(max_examples=50)
@given(sizes=st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=20), limit=st.integers(1, 80))
def test_every_parameter_is_in_one_bucket_in_backward_order(sizes: Any, limit: int) -> None:
    forward_order = [
        logical(f"{number}", numel, holders=ShardHolders(("tp",), 0, 2) if is_shared else SOLE_HOLDER)
        for number, (numel, is_shared) in enumerate(sizes)
    ]
    buckets = group_into_buckets(forward_order, limit)

    assert sorted(int(one.name) for bucket in buckets for one in bucket) == list(range(len(sizes)))
    num_open = 0
    for bucket in buckets:
        order = [int(one.name) for one in bucket]
        assert order == sorted(order, reverse=True)
        lengths = [one.parameter.numel() for one in bucket]
        assert sum(lengths[:-1]) < limit, "the bucket was full before its last parameter"
        num_open += sum(lengths) < limit
    assert num_open <= 2
