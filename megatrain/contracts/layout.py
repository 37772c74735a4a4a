"""The position of a rank: the named axes of a mesh, and pure functions that compute places along them.

AXES is the only list of axes. `pp` counts pipeline stages and is the outermost axis: a stage is a run of consecutive
ranks. A *factorization* describes how the ranks of one stage are divided further: a list of axes from outermost to
innermost. The first one, dense, numbers the ranks. tp is innermost, so that it stays inside a host; dp is inside pp,
because MegaScale sec. 3.2 gives data-parallel groups placement priority over pipeline groups. Every other factorization
divides the same ranks, in the same order, by other sizes; the size of its outermost axis follows from the others. So
the ranks along an axis are always evenly spaced: an axis of a layout is a size and a stride.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from megatrain.contracts.errors import TopologyError

Coordinate = Mapping[str, int]
"""A rank's place along each axis that its layout lists: axis -> index."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh.

    title: the kind of parallelism, in full. about: the relation of the ranks along it. cuts_model: these ranks hold
    parts of one copy of the model; along the other axes they compute different samples or tokens. deals_samples: each
    of these ranks reads different samples; along all other axes ranks work on the same samples. is_always_listed:
    files, pages and messages list the axis even if its size is 1. word: the usual word for a place on it, if that is
    not the name.
    """

    name: str
    title: str
    about: str
    cuts_model: bool = False
    deals_samples: bool = False
    is_always_listed: bool = False
    word: str = ""

    @property
    def size_name(self) -> str:
        """The name of the axis's size in options, files and columns."""
        return f"{self.name}_size"

    @property
    def rank_name(self) -> str:
        """The name of a rank's place on the axis in files and columns."""
        return f"{self.name}_rank"


AXES = (
    Axis("pp", "pipeline", "stages of a pipeline", cuts_model=True, is_always_listed=True, word="stage"),
    Axis(
        "dp",
        "data",
        "ranks that hold the same parameters and train on other samples",
        deals_samples=True,
        is_always_listed=True,
    ),
    Axis("cp", "context", "ranks that hold the same parameters and train on other tokens of the same samples"),
    Axis("tp", "tensor", "ranks that hold the other shards of the same layers", cuts_model=True, is_always_listed=True),
    Axis("edp", "expert-data", "ranks that hold the same experts and train on other tokens"),
    Axis("ep", "expert", "ranks that hold the other experts of the same layers", cuts_model=True),
)
"""All axes, in the order in which files and pages show them."""
STAGES = "pp"
DENSE = ("dp", "cp", "tp")
FACTORIZATIONS: Mapping[str, tuple[str, ...]] = {"dense": DENSE, "expert": ("edp", "ep")}
"""How the ranks of a stage are divided into axes, outermost first. The dense one determines their number."""
_FACTORIZED = tuple(FACTORIZATIONS.values())
REPLICAS = tuple(axes[0] for axes in _FACTORIZED)
"""The outermost axis of each factorization: gradients are summed and state is sharded along it."""
NEAREST = DENSE[-1]
"""The innermost axis: its ranks are consecutive, and usually on one host."""
DENSE_REPLICAS = tuple(axis.name for axis in AXES if axis.name in DENSE and not axis.cuts_model)
"""The axes along which ranks hold the same dense parameters."""
WITHIN_REPLICA = (STAGES, *DENSE[1:])
"""The axes along which one replica of the model is spread: the world size is the product of their sizes and dp's.

Axes of other factorizations divide the same ranks in another way, so their sizes are no further factors.
"""
_BY_NAME = {axis.name: axis for axis in AXES}
_DERIVED_SIZE = tuple(axes[0] for axes in FACTORIZATIONS.values() if axes is not DENSE)
SIZED_AXES = tuple(axis for axis in AXES if axis.name not in _DERIVED_SIZE)
"""The axes whose sizes define a layout; the sizes of the others follow."""
NUMBERING_AXES = tuple(axis for axis in AXES if axis.name == STAGES or axis.name in DENSE)
"""The axes that number the ranks, outermost first: the product of their sizes is the world size."""
HOLDERS_INFIX = "-in-"


def axis_named(name: str) -> Axis:
    """Return the axis of this name. Raises: TopologyError when there is none."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise TopologyError(f"there is no axis {name!r}; the axes are {', '.join(_BY_NAME)}") from None


def first_axis_of(group: str) -> str:
    """Return the axis of the group of this name, or its first axis: `dp` of `dp-cp`, `tp` of `tp-in-2`."""
    return group.partition("-")[0]


def _axes_beside(name: str) -> tuple[str, ...]:
    """Return the factorization that has the axis. Raises: TopologyError when none has it."""
    for axes in _FACTORIZED:
        if name in axes:
            return axes
    dividing = ", ".join(one for axes in _FACTORIZED for one in axes)
    raise TopologyError(f"the axis {axis_named(name).name} does not divide the ranks of a stage, unlike {dividing}")


@dataclass(frozen=True, slots=True)
class PlacedAxis:
    """An axis of one layout: ranks `stride` apart differ by one place along it."""

    name: str
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Holders:
    """The ranks along `axis` in `num_groups` groups of consecutive ranks. The ranks of a group hold the same part."""

    axis: str
    num_groups: int

    @property
    def name(self) -> str:
        return f"{self.axis}{HOLDERS_INFIX}{self.num_groups}"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Layout:
    """The axes of a job's mesh with their sizes: Layout(pp_size=2, dp_size=4). The default size is 1.

    Raises: TopologyError when a size is below 1 or its axis is unknown, or when a factorization does not divide a
    stage.
    """

    placed: tuple[PlacedAxis, ...]

    def __init__(self, **sizes: int) -> None:
        for name, size in sizes.items():
            if name not in (axis.size_name for axis in SIZED_AXES):
                known = ", ".join(axis.size_name for axis in SIZED_AXES)
                raise TopologyError(f"a layout has no size {name!r}={size}; its sizes are {known}")
            if size < 1:
                raise TopologyError(f"parallel.{name}={size} must be at least 1")
        size_of = {axis.name: sizes.get(axis.size_name, 1) for axis in SIZED_AXES}
        num_in_stage = prod(size_of[name] for name in DENSE)
        strides = {STAGES: num_in_stage}
        for left_over, *inner in FACTORIZATIONS.values():
            stride = 1
            for name in reversed(inner):
                strides[name] = stride
                stride *= size_of[name]
            strides[left_over] = stride
            if num_in_stage % stride:
                product = " * ".join(f"{name}_size" for name in inner)
                raise TopologyError(
                    f"{product} = {stride} must divide the {num_in_stage} ranks of a stage "
                    f"({' * '.join(f'{name}_size' for name in DENSE)})"
                )
            size_of[left_over] = num_in_stage // stride
        placed = tuple(PlacedAxis(axis.name, size_of[axis.name], strides[axis.name]) for axis in AXES)
        object.__setattr__(self, "placed", placed)

    @property
    def pp_size(self) -> int:
        return self.size(STAGES)

    @property
    def dp_size(self) -> int:
        return self.size("dp")

    @property
    def tp_size(self) -> int:
        return self.size("tp")

    @property
    def world_size(self) -> int:
        return self.size(STAGES) * self.stride(STAGES)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that describe this layout: those that are always listed, and others with a size above 1."""
        cut = {axis.name for axis in SIZED_AXES if axis.is_always_listed or self.size(axis.name) > 1}
        for axes in FACTORIZATIONS.values():
            if axes[0] in _DERIVED_SIZE and cut.intersection(axes).difference(DENSE):
                cut.add(axes[0])
        return tuple(axis.name for axis in AXES if axis.name in cut)

    @property
    def grid(self) -> tuple[str, ...]:
        """The listed axes that number the ranks, outermost first: the product of their sizes is the world size."""
        listed = self.axes
        return tuple(axis.name for axis in NUMBERING_AXES if axis.name in listed)

    @property
    def innermost_first(self) -> tuple[str, ...]:
        """The listed axes: first those that number the ranks, and axes of near ranks before those of far ranks."""
        return (*reversed(self.grid), *(axis for axis in reversed(self.axes) if axis not in self.grid))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by their names in options and files. `Layout(**layout.sizes) == layout`."""
        return {f"{name}_size": self.size(name) for name in self.axes if name not in _DERIVED_SIZE}

    @property
    def sizes_text(self) -> str:
        """The sizes for people: "pp 2, dp 4, tp 1"."""
        return ", ".join(f"{name} {self.size(name)}" for name in self.axes if name not in _DERIVED_SIZE)

    @property
    def has_replicas(self) -> bool:
        """Whether some ranks hold the same parameters and compute with them for other samples or tokens."""
        return any(self.size(axis) > 1 for axis in self.axes if not _BY_NAME[axis].cuts_model)

    @property
    def replica_group_size(self) -> int:
        """How many ranks hold the same part of a dense parameter and compute with it for other samples or tokens."""
        return prod(self.size(axis) for axis in DENSE_REPLICAS)

    def size(self, axis: str) -> int:
        return self._placed(axis).size

    def stride(self, axis: str) -> int:
        """Return the difference of the ranks at two consecutive places of an axis. A place is rank // stride % size."""
        return self._placed(axis).stride

    def index(self, axis: str, rank: int) -> int:
        """Return the place of a rank along an axis."""
        placed = self._placed(axis)
        return rank // placed.stride % placed.size

    def coordinate(self, rank: int) -> Coordinate:
        """Return the place of `rank` along each listed axis. Raises: TopologyError when the layout has no such rank."""
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} is outside the layout of {self.world_size} ranks ({self})")
        return {axis: self.index(axis, rank) for axis in self.axes}

    def rank_of(self, coordinate: Coordinate) -> int:
        """Return the rank at a coordinate.

        Raises: TopologyError when it lacks an axis that numbers the ranks, or a place is outside the axis.
        """
        missing = [axis for axis in self.grid if axis not in coordinate]
        if missing:
            raise TopologyError(f"the coordinate {dict(coordinate)} lacks {', '.join(missing)} of the layout {self}")
        for axis in self.grid:
            if not 0 <= coordinate[axis] < self.size(axis):
                raise TopologyError(f"{axis} {coordinate[axis]} is outside the layout {self}")
        return sum(coordinate[axis] * self.stride(axis) for axis in self.grid)

    def first_rank_of(self, stage: int) -> int:
        """Return the first rank of a stage of the pipeline."""
        return stage * self.stride(STAGES)

    def ranks_along(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along these axes, and `rank`. The first axis varies slowest."""
        found = [rank]
        for placed in map(self._placed, axes):
            starts = [member - member // placed.stride % placed.size * placed.stride for member in found]
            found = [start + place * placed.stride for start in starts for place in range(placed.size)]
        return tuple(found)

    def others_of(self, axis: str) -> tuple[str, ...]:
        """Return the other listed axes that number the ranks together with this one."""
        together = DENSE if axis == STAGES else _axes_beside(axis)
        return tuple(candidate for candidate in self.axes if candidate in (STAGES, *together) and candidate != axis)

    def replica_axes(self, axis: str) -> tuple[str, ...]:
        """Return the listed axes of the same factorization whose ranks hold the same parameters, such as dp and cp."""
        together = _axes_beside(axis)
        return tuple(
            candidate for candidate in self.axes if candidate in together and not _BY_NAME[candidate].cuts_model
        )

    def group_name(self, axes: Sequence[str]) -> str:
        """Return the name of the group of the ranks that differ only along these axes: `dp-cp`.

        Axes of size 1 are left out, so in a layout without cp it is `dp`.
        """
        return "-".join(axis for axis in axes if self.size(axis) > 1) or axes[0]

    @property
    def replica_spans(self) -> tuple[tuple[str, ...], ...]:
        """The axes along which ranks hold the same parameters, for each factorization with several such axes."""
        return tuple(axes for axes in self._replica_axes() if len(axes) > 1)

    def is_replica_group(self, axes: Sequence[str]) -> bool:
        """Return whether ranks exchange gradients and parameters in the group along these axes.

        They do so along all axes of a size above 1 along which ranks hold the same parameters, and along the outermost
        of these. Along an inner one, such as cp if there is dp too, ranks exchange tokens of the same samples.
        """
        return any(tuple(axes) == found[: len(axes)] for found in self._replica_axes())

    @property
    def num_sample_parts(self) -> int:
        """The number of parts into which the samples of a step are dealt."""
        return prod(self.size(axis.name) for axis in NUMBERING_AXES if axis.deals_samples)

    def sample_share(self, rank: int) -> tuple[int, int]:
        """Return (index, count): the samples of a step are dealt to `count` parts in turn; `rank` gets part `index`."""
        index = 0
        for axis in NUMBERING_AXES:
            if axis.deals_samples:
                index = index * self.size(axis.name) + self.index(axis.name, rank)
        return index, self.num_sample_parts

    def place_text(self, rank: int, *axes: str) -> str:
        """Return a rank's place as text: "stage 0, dp 3, tp 1". axes: only these, in the given order."""
        at = self.coordinate(rank)
        return ", ".join(f"{_BY_NAME[axis].word or axis} {at[axis]}" for axis in axes or self.axes)

    def _replica_axes(self) -> Iterator[tuple[str, ...]]:
        """Yield, for each factorization, the axes of a size above 1 along which ranks hold the same parameters."""
        for axes in _FACTORIZED:
            yield tuple(one for one in self.replica_axes(axes[0]) if self.size(one) > 1)

    def _placed(self, axis: str) -> PlacedAxis:
        for placed in self.placed:
            if placed.name == axis:
                return placed
        raise TopologyError(f"there is no axis {axis!r}; the axes are {', '.join(_BY_NAME)}")

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.sizes.items())

    def __repr__(self) -> str:
        return f"Layout({', '.join(f'{name}={size}' for name, size in self.sizes.items())})"
