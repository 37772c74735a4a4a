"""Where the values of each parameter lie: a table of rows, and what one rank holds by it.

A row says for the parameters of a pattern how they are cut, whose ranks hold copies, and which matrices are fused in
them. Everything that a rank does with a parameter follows from what the row gives for its place: which box of it the
rank holds, over which ranks the gradient is summed and the state sharded, who counts a value in a norm, who saves it.
Pure, and without torch. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from math import prod

from megatrain.contracts.errors import TopologyError
from megatrain.contracts.layout import STAGES, Coordinate, Layout, Neighbours
from megatrain.parallel.boxes import Box

PIPELINE_ENDS = "embedding"
"""The group of the first and the last stage of a pipeline, which both hold a tied embedding."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Equal parts along `dim`, dealt in order to the ranks along an axis.

    num_parts: None for as many as the axis has ranks. Where it has more, so many neighbours hold the same part.
    """

    axis: str
    dim: int
    num_parts: int | None = None


@dataclass(frozen=True, slots=True)
class Fused:
    """The logical matrices of one tensor, or their biases, side by side along `dim`.

    Each has one index of it, in the order of `names`, but the first: that has all indices before the others'.
    has_own_parts: where a cut's axis has more ranks than the tensor has indices along the cut, each index goes to as
    many neighbours. They hold the same of all matrices but the first, and of that one each a part of its indices.
    """

    dim: int
    names: tuple[str, ...]
    has_own_parts: bool = False

    def ranges(self, shape: Sequence[int]) -> dict[str, tuple[int, int]]:
        """Return the indices [start, stop) of each matrix in a tensor of `shape`; without the first if none are left.

        So of [G, R + 2, D, H] the names q, k, v have R, 1 and 1; of [1, F, H] the last of gate, up has all.
        """
        first = shape[self.dim] - len(self.names) + 1
        starts = [0, *range(first, shape[self.dim])]
        ends = range(first, shape[self.dim] + 1)
        ranges = zip(self.names, starts, ends, strict=True)
        return {name: (start, stop) for name, start, stop in ranges if start < stop}


@dataclass(frozen=True, slots=True)
class PlacementRow:
    """What holds for every parameter whose name in the module matches `pattern`.

    cut: None where each rank of a stage holds all of it.
    replica_group: holds the same part and computes with it for other tokens. The gradient is summed over it, and it
    shards the optimizer's state.
    sum_group: holds the same again, and what of the gradient comes from there is missing here: a further sum.
    logical_name: of the parameter of the single-device model that this is a copy of, where that is another one.
    """

    pattern: str
    cut: Cut | None = None
    replica_group: str = "dp"
    sum_group: str = ""
    logical_name: str = ""
    fused: Fused | None = None


@dataclass(frozen=True, slots=True)
class Copies:
    """The ranks that hold the same share of the same values, beside the replica group: `group` "" where there are none.

    index: this rank's place among them. The first one's values count in sums over all parameters.
    """

    group: str = ""
    index: int = 0
    count: int = 1


NO_COPIES = Copies()


@dataclass(frozen=True, slots=True)
class Placement:
    """A box that one rank holds of a logical parameter, and with whom."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    replica_group: str = "dp"
    copies: Copies = NO_COPIES


def row_of(name: str, table: Sequence[PlacementRow]) -> PlacementRow:
    """Return the first row that matches. Raises: TopologyError when none does."""
    for row in table:
        if fnmatchcase(name, row.pattern):
            return row
    raise TopologyError(f"parameter {name} is in no row of the table of placements; add one (parallel/decoder.py)")


def place(
    name: str, shape: Sequence[int], row: PlacementRow, layout: Layout, coordinate: Coordinate
) -> tuple[Placement, ...]:
    """Return what the rank at `coordinate` holds of a parameter of `shape`, which is on its stage.

    One placement; of fused matrices that have parts of their own two, end to end in the memory of the rank's tensor.
    Raises: TopologyError when the parameter cannot be cut so.
    """
    copies = _copies(row.sum_group, layout, coordinate)
    boxes = [(Box((0,) * len(shape), tuple(shape)), copies)]
    if row.cut is not None:
        dim, axis_size, index = row.cut.dim, layout.size(row.cut.axis), coordinate.get(row.cut.axis, 0)
        has_own_parts = row.fused is not None and row.fused.has_own_parts and axis_size > shape[dim]
        num_parts = row.cut.num_parts or (shape[dim] if has_own_parts else axis_size)
        if axis_size % num_parts or shape[dim] % num_parts:
            raise TopologyError(
                f"{name} of shape {list(shape)} cannot be cut along dim {dim} in {num_parts} parts for "
                f"{row.cut.axis}_size={axis_size}; both numbers must be multiples of the parts"
            )
        num_holders = axis_size // num_parts
        if num_holders > 1:
            assert not row.sum_group, f"{row.pattern}: the holders of one part have one sum"
            copies = Copies(Neighbours(row.cut.axis, num_parts).name, index % num_holders, num_holders)
        whole = _part(boxes[0][0], dim, index // num_holders, num_parts)
        boxes = _own_parts(name, whole, row.fused, copies) if has_own_parts and row.fused else [(whole, copies)]
    return tuple(
        Placement(row.logical_name or name, tuple(shape), box, row.replica_group, of_box) for box, of_box in boxes
    )


def tensor_shape(placements: Sequence[Placement]) -> tuple[int, ...]:
    """Return the shape of the tensor that holds these boxes end to end: they follow each other along one dim."""
    boxes = [placement.box for placement in placements]
    sizes = list(boxes[0].sizes)
    for one, following in pairwise(boxes):
        (dim,) = (dim for dim, (a, b) in enumerate(zip(one.offsets, following.offsets, strict=True)) if a != b)
        sizes[dim] += following.sizes[dim]
    return tuple(sizes)


def _part(box: Box, dim: int, index: int, num_parts: int) -> Box:
    """Return part number `index` of a box that is cut along `dim`."""
    size = box.sizes[dim] // num_parts
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim], sizes[dim] = offsets[dim] + index * size, size
    return Box(tuple(offsets), tuple(sizes))


def _own_parts(name: str, box: Box, fused: Fused, copies: Copies) -> list[tuple[Box, Copies]]:
    """Return of what neighbours hold together this rank's part of the first matrix, and all of the others."""
    dim, num_others = fused.dim, len(fused.names) - 1
    num_first = box.sizes[dim] - num_others
    if num_first % copies.count:
        raise TopologyError(
            f"{fused.names[0]} of {name} has {num_first} parts along dim {dim} for each of {copies.group}, which "
            f"{copies.count} ranks share; the first number must be a multiple of the second"
        )
    assert prod(box.sizes[:dim]) == 1, f"{name}: matrices that lie side by side are not end to end in memory"

    def within(start: int, size: int) -> Box:
        offsets = (*box.offsets[:dim], start, *box.offsets[dim + 1 :])
        return Box(offsets, (*box.sizes[:dim], size, *box.sizes[dim + 1 :]))

    num_own = num_first // copies.count
    return [(within(copies.index * num_own, num_own), NO_COPIES), (within(num_first, num_others), copies)]


def _copies(group: str, layout: Layout, coordinate: Coordinate) -> Copies:
    if not group:
        return NO_COPIES
    if group == PIPELINE_ENDS:
        return Copies(group, index=min(coordinate[STAGES], 1), count=2)
    return Copies(group, coordinate.get(group, 0), layout.size(group))
