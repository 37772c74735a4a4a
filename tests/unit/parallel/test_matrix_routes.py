"""Routes of whole matrices: every owner gets all values of its matrices, and every shard gets the results back."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from megatrain.contracts.layout import Layout
from megatrain.parallel.boxes import Box
from megatrain.parallel.decoder import decoder_table
from megatrain.parallel.logical_matrices import HiddenWeight, LogicalMatrix, matrices_of, owners_of
from megatrain.parallel.matrix_routes import MatrixRoutes, PlacedWeight, matrix_routes
from megatrain.parallel.placement import Fused, placements_of, row_of

Numbers = NDArray[np.float64]
SHAPES = {
    "blocks.0.attention.qkv.weight": (2, 4, 3, 5),
    "blocks.0.attention.out.weight": (5, 12),
    "blocks.0.mlp.up.weight": (2, 8, 5),
    "blocks.0.mlp.down.weight": (5, 8),
}


def cost(matrix: LogicalMatrix) -> float:
    return float(matrix.num_rows * matrix.num_columns)


def weights_on(num_parts: int, num_replicas: int, bucket_of: dict[str, int]) -> list[PlacedWeight]:
    """Return the four weights of a block, in two buckets with arbitrary shard borders."""
    layout = Layout(tp_size=num_parts)
    placed, ends = [], [0, 0]
    for name, shape in SHAPES.items():
        row = row_of(name, decoder_table())
        held = (placements_of(name, shape, row, layout, rank) for rank in range(num_parts))
        boxes = tuple(tuple(placement.box for placement in placements) for placements in held)
        bucket = bucket_of[name]
        placed.append((bucket, ends[bucket], HiddenWeight(matrices_of(name, shape, row.fused), boxes, "tp")))
        ends[bucket] += sum(box.numel for box in boxes[0])
    return [PlacedWeight(bucket, -(-ends[bucket] // num_replicas), start, weight) for bucket, start, weight in placed]


def slices(box: Box, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
    starts = [at - first for at, first in zip(box.offsets, origin or (0,) * len(box.offsets), strict=True)]
    return tuple(slice(at, at + size) for at, size in zip(starts, box.sizes, strict=True))


def shards_of(weights: list[PlacedWeight], whole: dict[str, Numbers], place: tuple[int, int]) -> list[Numbers]:
    """Return the shard of each bucket at a place of the grid, cut from the whole weights."""
    replica, part = place
    shards = []
    for bucket in (0, 1):
        mine = [weight for weight in weights if weight.bucket == bucket]
        flat = [whole[one.weight.matrices[0].parameter][slices(box)].ravel() for one in mine
                for box in one.weight.boxes[part]]  # fmt: skip
        size = mine[0].shard_numel
        padded = np.zeros(size * 8)
        padded[: sum(map(len, flat))] = np.concatenate(flat)
        shards.append(padded[replica * size : (replica + 1) * size])
    return shards


def swapped(sent: list[Numbers], sizes: list[tuple[int, ...]]) -> list[Numbers]:
    """Return what each member of a group receives when all have sent."""
    parts = [np.split(one, np.cumsum(of_one)[:-1]) for one, of_one in zip(sent, sizes, strict=True)]
    return [np.concatenate([of_one[member] for of_one in parts]) for member in range(len(sent))]


@pytest.mark.parametrize("is_one_bucket", [False, True])
@pytest.mark.parametrize("grid", [(1, 1), (3, 1), (1, 2), (2, 4), (5, 2)], ids=str)
def test_owners_get_whole_matrices(grid: tuple[int, int], is_one_bucket: bool) -> None:
    num_replicas, num_parts = grid
    bucket_of = {name: number % 2 for number, name in enumerate(SHAPES)}
    if is_one_bucket:
        bucket_of = {name: int(name.endswith("down.weight")) for name in SHAPES}
    weights = weights_on(num_parts, num_replicas, bucket_of)
    whole = {name: np.random.default_rng(0).random(shape) for name, shape in SHAPES.items()}
    places = list(product(range(num_replicas), range(num_parts)))
    routes = {place: matrix_routes(weights, cost, grid, place) for place in places}
    packed = {place: packed_of(routes[place], shards_of(weights, whole, place)) for place in places}
    arrived: dict[tuple[int, int], Numbers] = {}
    for part in range(num_parts):
        column = [(replica, part) for replica in range(num_replicas)]
        assert_alike([routes[one].along_replicas for one in column])
        got = swapped([packed[one] for one in column], [routes[one].along_replicas.sent for one in column])
        arrived |= dict(zip(column, got, strict=True))
    final: dict[tuple[int, int], Numbers] = {}
    for replica in range(num_replicas):
        row = [(replica, part) for part in range(num_parts)]
        assert_alike([routes[one].along_cut for one in row])
        spanned = [np.concatenate([np.empty(0), *(arrived[one][span] for span in routes[one].spans)]) for one in row]
        final |= dict(zip(row, swapped(spanned, [routes[one].along_cut.sent for one in row]), strict=True))

    owned = Counter()
    for place in places:
        for one in routes[place].owned:
            owned[one.matrix] += 1
            values = np.full(one.matrix.box.sizes, np.nan)
            for at, box in one.parts:
                values[slices(box, one.matrix.box.offsets)] = final[place][at : at + box.numel].reshape(box.sizes)
            assert np.array_equal(values, whole[one.matrix.parameter][slices(one.matrix.box)])
    assert set(owned.values()) == {1}
    assert [(one.parameter.split(".")[-2], one.name) for one in sorted(owned, key=str)] == [
        *[("out", ""), ("qkv", "k"), ("qkv", "q"), ("qkv", "v"), ("down", ""), ("up", "gate"), ("up", "up")]
    ]


def test_weight_whose_parts_are_not_whole_is_refused() -> None:
    """The ranks along the requested axis hold one half: a matrix assembled from it would have random values."""
    name, shape = "blocks.0.mlp.up.weight", (2, 8, 5)
    fused = row_of(name, decoder_table()).fused
    half = Box((0, 0, 0), (2, 4, 5))
    for boxes, num_held in (((half,),), 20), (((half,), (half,)), 20), (((half,), (Box((0, 3, 0), (2, 5, 5)),)), 45):
        weight = HiddenWeight(matrices_of(name, shape, fused), boxes, "tp")
        with pytest.raises(
            ValueError, match=rf"the {len(boxes)} ranks along tp hold {num_held} values of .*{name}, which has 40"
        ):
            matrix_routes([PlacedWeight(0, 128, 0, weight)], cost, (1, len(boxes)), (0, 0))


def packed_of(routes: MatrixRoutes, shards: list[Numbers]) -> Numbers:
    parts = []
    for _, region in routes.regions:
        around = shards[region.bucket][region.flat : region.flat + region.around.numel].reshape(region.around.sizes)
        parts.append(around[slices(region.box, region.around.offsets)].ravel())
    return np.concatenate([np.empty(0), *parts])


def assert_alike(hops: list) -> None:
    """Check that what one rank sends to another is what the other receives."""
    for one, other in product(range(len(hops)), repeat=2):
        assert hops[one].sent[other] == hops[other].received[one]


def test_fused_weights_are_split_into_matrices() -> None:
    qkv, up = (row_of(f"blocks.0.{name}.weight", decoder_table()).fused for name in ("attention.qkv", "mlp.up"))
    queries, keys, values = matrices_of("w", (2, 6, 3, 5), qkv)
    (only,) = matrices_of("w", (1, 8, 5), up)

    assert (queries.name, queries.num_rows, queries.num_columns) == ("q", 2 * 4 * 3, 5)
    assert (keys.box, values.box) == (Box((0, 4, 0, 0), (2, 1, 3, 5)), Box((0, 5, 0, 0), (2, 1, 3, 5)))
    assert (only.name, only.box) == ("up", Box((0, 0, 0), (1, 8, 5)))
    assert matrices_of("w", (4, 5), None) == (LogicalMatrix("w", "", Box((0, 0), (4, 5))),)


def test_matrices_are_assigned_evenly_to_owners() -> None:
    matrices = [*matrices_of("w", (4, 5, 7), Fused(0, ("a", "b", "c", "d"))), *matrices_of("v", (30, 7), None)]

    # The largest goes first; the others go to the rank with the least work.
    assert owners_of(matrices, cost, 3) == (1, 2, 1, 2, 0)
    assert owners_of(matrices, cost, 1) == (0,) * 5
    assert owners_of([], cost, 3) == ()
