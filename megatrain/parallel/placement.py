"""Which rank holds which values of each parameter: a table of rows, and the placements computed from it.

A row describes the parameters that match a pattern: how they are sharded, which ranks hold the same shard, and which
matrices are fused in them. A rank's placement follows from the row and the rank's coordinate. It gives which box of the
parameter the rank holds, over which ranks the gradient is summed and the state sharded, which rank counts a value in a
norm, and which rank saves it. Pure functions: no I/O and no clock, and no import of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from math import prod

from megatrain.contracts.errors import TopologyError
from megatrain.contracts.layout import DENSE_REPLICAS, REPLICAS, STAGES, Holders, Layout
from megatrain.parallel.boxes import Box

PIPELINE_ENDS = "embedding"
"""The name of the group of a pipeline's first and last stage, which both hold a tied embedding."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A partition into equal parts along `dim`. The ranks along `axis` hold the parts in order.

    num_parts: None for one part per rank of the axis. If the axis has more ranks than parts, consecutive ranks hold the
    same part, the same number of ranks for each part.
    """

    axis: str
    dim: int
    num_parts: int | None = None


@dataclass(frozen=True, slots=True)
class Fused:
    """The logical matrices (or their biases) that lie side by side along `dim` of one tensor.

    They lie in the order of `names`. Of the indices of `dim`, the last len(names) - 1 hold one matrix each; the first
    matrix has all earlier indices.
    splits_first: when a cut has more ranks than the tensor has indices along the cut, several ranks hold each index.
    They then split the first matrix (the queries), and each holds all of the other matrices (the key and the value).
    """

    dim: int
    names: tuple[str, ...]
    splits_first: bool = False

    def ranges(self, shape: Sequence[int]) -> dict[str, tuple[int, int]]:
        """Return the indices [start, stop) of each matrix in a tensor of `shape`; a matrix without indices is left out.

        In [G, R + 2, D, H], the names q, k, v have R, 1 and 1 indices. In [1, F, H], up has the only index, gate none.
        """
        first = shape[self.dim] - len(self.names) + 1
        starts = [0, *range(first, shape[self.dim])]
        ends = range(first, shape[self.dim] + 1)
        ranges = zip(self.names, starts, ends, strict=True)
        return {name: (start, stop) for name, start, stop in ranges if start < stop}


@dataclass(frozen=True, slots=True)
class PlacementRow:
    """The placement of every parameter whose name in the module matches `pattern`.

    cut: None if each rank of a stage holds the whole parameter.
    replica_axes: ranks along these axes hold the same part and use it for different tokens. The gradient is summed over
    their group, and the optimizer state is sharded over it.
    sum_groups: axes, or PIPELINE_ENDS, along which ranks also hold the same part. Each computes only a part of the
    gradient, so the gradient is summed over these groups as well, one after the other; the state is not sharded over
    them.
    may_lack_gradient: a micro-batch may leave the parameter unused, such as an expert that gets no token. Its bucket is
    then reduced after the chunk's last backward, and no other bucket waits for it. The encoder of pictures does not
    need it, although text leaves it unused: it is last in backward, so no bucket follows.
    logical_name: the name of the single-device model's parameter that this one is a copy of, if it differs.
    is_hidden_weight: the parameter maps hidden states to hidden states, unlike an embedding or a head. The last dim of
    its tensor has the inputs; the others together have the outputs.
    is_vector: a bias, a scale or the like: without weight decay. Parameters with names that end with "bias" or
    "norm.weight" are always vectors.
    """

    pattern: str
    cut: Cut | None = None
    replica_axes: tuple[str, ...] = DENSE_REPLICAS
    sum_groups: tuple[str, ...] = ()
    may_lack_gradient: bool = False
    logical_name: str = ""
    fused: Fused | None = None
    is_hidden_weight: bool = False
    is_vector: bool = False


@dataclass(frozen=True, slots=True)
class ShardHolders:
    """The ranks that hold the same shard: the same box and, since they have the same samples, the same part of the box.

    If the shard has a gradient, each rank has a part of the gradient, and these are summed over the ranks. Only the
    first rank's values count in sums over all parameters.
    groups: the groups that join these ranks; empty if this rank is the only one. index: this rank's index among them;
    the place in the last group varies fastest.
    """

    groups: tuple[str, ...] = ()
    index: int = 0
    count: int = 1


SOLE_HOLDER = ShardHolders()


@dataclass(frozen=True, slots=True)
class Placement:
    """A box of a logical parameter that one rank holds, and the groups of ranks that hold it too."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    replica_group: str = REPLICAS[0]
    holders: ShardHolders = SOLE_HOLDER


def row_of(name: str, table: Sequence[PlacementRow]) -> PlacementRow:
    """Return the first row whose pattern matches `name`. Raises: TopologyError when no pattern matches."""
    for row in table:
        if fnmatchcase(name, row.pattern):
            return row
    raise TopologyError(f"parameter {name} matches no row of the placement table; add a row (parallel/decoder.py)")


def placements_of(
    name: str, shape: Sequence[int], row: PlacementRow, layout: Layout, rank: int
) -> tuple[Placement, ...]:
    """Return the placements of a parameter of `shape` on a rank of `layout`. The rank's stage must have it.

    There is one placement, or two if several ranks split the first of the fused matrices (splits_first). The two boxes
    lie one after the other in the memory of the rank's tensor.
    Raises: TopologyError when the parameter cannot be cut as the row requires.
    """
    holders = _holders(row.sum_groups, layout, rank)
    boxes = [(Box((0,) * len(shape), tuple(shape)), holders)]
    if row.cut is not None:
        dim, axis_size, index = row.cut.dim, layout.size(row.cut.axis), layout.index(row.cut.axis, rank)
        splits_first = row.fused is not None and row.fused.splits_first and axis_size > shape[dim]
        num_parts = row.cut.num_parts or (shape[dim] if splits_first else axis_size)
        if axis_size % num_parts or shape[dim] % num_parts:
            raise TopologyError(
                f"{name} of shape {list(shape)} cannot be cut along dim {dim} in {num_parts} parts for "
                f"{row.cut.axis}_size={axis_size}; {num_parts} must divide both {axis_size} and {shape[dim]}"
            )
        num_holders = axis_size // num_parts
        if num_holders > 1:
            assert not row.sum_groups, (
                f"{row.pattern}: a parameter cannot have a sum group if several ranks hold the same part of it"
            )
            holders = ShardHolders((Holders(row.cut.axis, num_parts).name,), index % num_holders, num_holders)
        whole = _part(boxes[0][0], dim, index // num_holders, num_parts)
        boxes = _own_parts(name, whole, row.fused, holders) if splits_first and row.fused else [(whole, holders)]
    replica_group = layout.group_name(row.replica_axes)
    return tuple(Placement(row.logical_name or name, tuple(shape), box, replica_group, of_box) for box, of_box in boxes)


def tensor_shape(placements: Sequence[Placement]) -> tuple[int, ...]:
    """Return the shape of the tensor that holds these boxes end to end. The boxes are adjacent along one dim."""
    boxes = [placement.box for placement in placements]
    sizes = list(boxes[0].sizes)
    for box, following in pairwise(boxes):
        (dim,) = (dim for dim, (a, b) in enumerate(zip(box.offsets, following.offsets, strict=True)) if a != b)
        sizes[dim] += following.sizes[dim]
    return tuple(sizes)


def _part(box: Box, dim: int, index: int, num_parts: int) -> Box:
    """Return part number `index` of a box that is cut along `dim`."""
    size = box.sizes[dim] // num_parts
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim], sizes[dim] = offsets[dim] + index * size, size
    return Box(tuple(offsets), tuple(sizes))


def _own_parts(name: str, box: Box, fused: Fused, holders: ShardHolders) -> list[tuple[Box, ShardHolders]]:
    """Return this rank's part of the first matrix, and all other matrices, of a `box` that several ranks hold."""
    dim, num_others = fused.dim, len(fused.names) - 1
    num_first = box.sizes[dim] - num_others
    if num_first % holders.count:
        raise TopologyError(
            f"{name}: {holders.count} ranks of a group of {holders.groups[0]} split {fused.names[0]}, which has "
            f"{num_first} {'index' if num_first == 1 else 'indices'} along dim {dim}; "
            f"{holders.count} must divide {num_first}"
        )
    assert prod(box.sizes[:dim]) == 1, f"{name}: matrices that are fused side by side are not contiguous in memory"

    def within(start: int, size: int) -> Box:
        offsets = (*box.offsets[:dim], start, *box.offsets[dim + 1 :])
        return Box(offsets, (*box.sizes[:dim], size, *box.sizes[dim + 1 :]))

    num_own = num_first // holders.count
    return [(within(holders.index * num_own, num_own), SOLE_HOLDER), (within(num_first, num_others), holders)]


def _holders(groups: Sequence[str], layout: Layout, rank: int) -> ShardHolders:
    index, count = 0, 1
    for group in groups:
        is_ends = group == PIPELINE_ENDS
        size = 2 if is_ends else layout.size(group)
        index = index * size + (min(layout.index(STAGES, rank), 1) if is_ends else layout.index(group, rank))
        count *= size
    return ShardHolders(tuple(groups), index, count)
