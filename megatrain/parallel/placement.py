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

from megatrain.contracts.errors import TopologyError
from megatrain.contracts.layout import STAGES, Coordinate, Layout
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
    """

    dim: int
    names: tuple[str, ...]

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
    """What one rank holds of a logical parameter, and with whom."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    replica_group: str = "dp"
    copies: Copies = NO_COPIES

    @property
    def groups(self) -> tuple[str, str]:
        """The names of the groups that its gradient is summed over: what may share a bucket agrees in them."""
        return self.replica_group, self.copies.group


def row_of(name: str, table: Sequence[PlacementRow]) -> PlacementRow:
    """Return the first row that matches. Raises: TopologyError when none does."""
    for row in table:
        if fnmatchcase(name, row.pattern):
            return row
    raise TopologyError(f"parameter {name} is in no row of the table of placements; add one (parallel/decoder.py)")


def place(name: str, shape: Sequence[int], row: PlacementRow, layout: Layout, coordinate: Coordinate) -> Placement:
    """Return what the rank at `coordinate` holds of a parameter of `shape`, which is on its stage.

    Raises: TopologyError when the parameter cannot be cut so.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    copies = _copies(row.sum_group, layout, coordinate)
    if row.cut is not None:
        dim, axis_size, index = row.cut.dim, layout.size(row.cut.axis), coordinate.get(row.cut.axis, 0)
        num_parts = row.cut.num_parts or axis_size
        if axis_size % num_parts or shape[dim] % num_parts:
            raise TopologyError(
                f"{name} of shape {list(shape)} cannot be cut along dim {dim} in {num_parts} parts for "
                f"{row.cut.axis}_size={axis_size}; both numbers must be multiples of the parts"
            )
        num_holders = axis_size // num_parts
        sizes[dim] //= num_parts
        offsets[dim] = index // num_holders * sizes[dim]
        if num_holders > 1:
            assert not row.sum_group, f"{row.pattern}: the holders of one part have one sum"
            copies = Copies(f"{row.cut.axis}-in-{num_parts}", index % num_holders, num_holders)
    box = Box(tuple(offsets), tuple(sizes))
    return Placement(row.logical_name or name, tuple(shape), box, row.replica_group, copies)


def _copies(group: str, layout: Layout, coordinate: Coordinate) -> Copies:
    if not group:
        return NO_COPIES
    if group == PIPELINE_ENDS:
        return Copies(group, index=min(coordinate[STAGES], 1), count=2)
    return Copies(group, coordinate.get(group, 0), layout.size(group))
