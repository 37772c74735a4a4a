"""Where a rank sits: the named axes of a mesh, and the pure arithmetic of places along them.

AXES is the one list. `pp` counts pipeline stages, the outermost axis: a stage is a run of consecutive ranks. How the
ranks of one stage are dealt further is a *factorisation*, a list of axes from outermost to innermost. The first one,
dense, numbers the ranks: tp is innermost, so that it stays inside a host; dp comes before pp, because MegaScale
sec. 3.2 gives data-parallel groups placement priority over pipeline groups. Every other factorisation looks at the same
ranks in the same order by other sizes; its own outermost axis has what is left over.

So the ranks along an axis are always evenly spaced: an axis of a layout is a size and a stride.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from megatrain.contracts.errors import TopologyError

Coordinate = Mapping[str, int]
"""A rank's place along each axis that its layout is told by: axis -> index."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A row of the list of axes.

    title: the kind of parallelism, in full. about: what the ranks along it are to each other. cuts_model: they hold
    parts of one copy of the model; along other axes they compute other samples or tokens. is_always_told: files, pages
    and messages have it also where its size is 1. word: what people call a place on it, if it is not the name.
    """

    name: str
    title: str
    about: str
    cuts_model: bool = False
    is_always_told: bool = False
    word: str = ""

    @property
    def size_name(self) -> str:
        """What options, files and columns call the axis's size."""
        return f"{self.name}_size"

    @property
    def rank_name(self) -> str:
        """What files and columns call a rank's place on the axis."""
        return f"{self.name}_rank"


AXES = (
    Axis("pp", "pipeline", "stages of a pipeline, in order", cuts_model=True, is_always_told=True, word="stage"),
    Axis("dp", "data", "holders of the same parameters, who see other samples", is_always_told=True),
    Axis("cp", "context", "holders of the same parameters, who see other tokens of the same samples"),
    Axis("tp", "tensor", "holders of the other shards of the same layers", cuts_model=True, is_always_told=True),
    Axis("edp", "expert-data", "holders of the same experts, who see other tokens"),
    Axis("ep", "expert", "holders of the other experts of the same layers", cuts_model=True),
)
"""Every axis there is, in the order in which they are told."""
STAGES = "pp"
DENSE = ("dp", "cp", "tp")
FACTORISATIONS: Mapping[str, tuple[str, ...]] = {"dense": DENSE, "expert": ("edp", "ep")}
"""How the ranks of a stage are dealt to axes, outermost first. The dense one says how many ranks a stage has."""
REPLICAS = tuple(axes[0] for axes in FACTORISATIONS.values())
"""The outermost axis of each factorisation: along it gradients are summed, and state is sharded."""
_BY_NAME = {axis.name: axis for axis in AXES}
_LEFT_OVER = tuple(axes[0] for axes in FACTORISATIONS.values() if axes is not DENSE)
SIZED_AXES = tuple(axis for axis in AXES if axis.name not in _LEFT_OVER)
"""The axes whose sizes a layout is given; the sizes of the others follow."""
NUMBERING_AXES = tuple(axis for axis in AXES if axis.name == STAGES or axis.name in DENSE)
"""The axes that number the ranks, outermost first: the product of their sizes is the world size."""
NEIGHBOURS_INFIX = "-in-"


def axis_named(name: str) -> Axis:
    """Return the row of this name. Raises: TopologyError when there is none."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise TopologyError(f"there is no axis {name!r}; the axes are {', '.join(_BY_NAME)}") from None


@dataclass(frozen=True, slots=True)
class PlacedAxis:
    """An axis of one layout: ranks `stride` apart are neighbours on it."""

    name: str
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The ranks along `axis` in `num_groups` runs of equal length: what is cut in so many parts, a run holds one of."""

    axis: str
    num_groups: int

    @property
    def name(self) -> str:
        return f"{self.axis}{NEIGHBOURS_INFIX}{self.num_groups}"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Layout:
    """The axes of a job's mesh with their sizes: Layout(pp_size=2, dp_size=4). A size that is not given is 1.

    Raises: TopologyError when a size is below 1 or of no axis, or where a stage cannot be dealt to a factorisation.
    """

    placed: tuple[PlacedAxis, ...]

    def __init__(self, **sizes: int) -> None:
        for name, size in sizes.items():
            if name not in (axis.size_name for axis in SIZED_AXES):
                known = ", ".join(axis.size_name for axis in SIZED_AXES)
                raise TopologyError(f"a layout is not given {name!r}={size}; it is given {known}")
            if size < 1:
                raise TopologyError(f"parallel.{name}={size} must be at least 1")
        size_of = {axis.name: sizes.get(axis.size_name, 1) for axis in SIZED_AXES}
        num_in_stage = prod(size_of[name] for name in DENSE)
        strides = {STAGES: num_in_stage}
        for left_over, *inner in FACTORISATIONS.values():
            stride = 1
            for name in reversed(inner):
                strides[name] = stride
                stride *= size_of[name]
            strides[left_over] = stride
            if num_in_stage % stride:
                told = " * ".join(f"{name}_size" for name in inner)
                raise TopologyError(
                    f"{told} = {stride} must divide the {num_in_stage} ranks of a stage "
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
        """The axes by which this layout is told: those that always are, and what is cut besides."""
        cut = {axis.name for axis in SIZED_AXES if axis.is_always_told or self.size(axis.name) > 1}
        for axes in FACTORISATIONS.values():
            if axes[0] in _LEFT_OVER and cut.intersection(axes).difference(DENSE):
                cut.add(axes[0])
        return tuple(axis.name for axis in AXES if axis.name in cut)

    @property
    def grid(self) -> tuple[str, ...]:
        """The told axes that number the ranks, outermost first: the product of their sizes is the world size."""
        told = self.axes
        return tuple(axis.name for axis in NUMBERING_AXES if axis.name in told)

    @property
    def innermost_first(self) -> tuple[str, ...]:
        """The told axes, those that number the ranks before the others, and neighbours' before those of far ranks."""
        return (*reversed(self.grid), *(axis for axis in reversed(self.axes) if axis not in self.grid))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes as options and files name them. `Layout(**layout.sizes) == layout`."""
        return {f"{name}_size": self.size(name) for name in self.axes if name not in _LEFT_OVER}

    @property
    def sizes_text(self) -> str:
        """The sizes for people: "pp 2, dp 4, tp 1"."""
        return ", ".join(f"{name} {self.size(name)}" for name in self.axes if name not in _LEFT_OVER)

    @property
    def has_replicas(self) -> bool:
        """Whether some ranks hold the same parameters and compute with them for other samples or tokens."""
        return any(self.size(axis) > 1 for axis in self.axes if not _BY_NAME[axis].cuts_model)

    def size(self, axis: str) -> int:
        return self._placed(axis).size

    def stride(self, axis: str) -> int:
        """Return how many ranks apart neighbours along an axis are. A place is rank // stride % size."""
        return self._placed(axis).stride

    def index(self, axis: str, rank: int) -> int:
        """Return the place of a rank along an axis."""
        placed = self._placed(axis)
        return rank // placed.stride % placed.size

    def coordinate(self, rank: int) -> Coordinate:
        """Return the place of `rank`. Raises: TopologyError when it is not one of this layout's ranks."""
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} is outside the layout of {self.world_size} ranks ({self})")
        return {axis: self.index(axis, rank) for axis in self.axes}

    def rank_of(self, coordinate: Coordinate) -> int:
        """Return the rank at a place; along an axis that the coordinate lacks, the first."""
        return sum(coordinate.get(axis, 0) * self.stride(axis) for axis in self.grid)

    def ranks_along(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` along these axes alone, in their order, `rank` among them."""
        found = [rank]
        for placed in map(self._placed, axes):
            starts = [one - one // placed.stride % placed.size * placed.stride for one in found]
            found = [start + place * placed.stride for start in starts for place in range(placed.size)]
        return tuple(found)

    def others_of(self, axis: str) -> tuple[str, ...]:
        """Return the told axes that number the ranks together with this one, without it."""
        together = next(axes for axes in FACTORISATIONS.values() if axis in (STAGES, *axes))
        return tuple(one for one in self.axes if one in (STAGES, *together) and one != axis)

    def replica_axes(self, axis: str) -> tuple[str, ...]:
        """Return the told axes of this one's factorisation whose ranks hold the same: dp and cp for either."""
        together = next(axes for axes in FACTORISATIONS.values() if axis in axes)
        return tuple(one for one in self.axes if one in together and not _BY_NAME[one].cuts_model)

    def place_text(self, rank: int, *axes: str) -> str:
        """Return a rank's place in words: "stage 0, dp 3, tp 1". axes: along these alone, in the order of all."""
        at = self.coordinate(rank)
        return ", ".join(f"{_BY_NAME[axis].word or axis} {at[axis]}" for axis in axes or self.axes)

    def _placed(self, axis: str) -> PlacedAxis:
        for placed in self.placed:
            if placed.name == axis:
                return placed
        raise TopologyError(f"there is no axis {axis!r}; the axes are {', '.join(_BY_NAME)}")

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.sizes.items())

    def __repr__(self) -> str:
        return f"Layout({', '.join(f'{name}={size}' for name, size in self.sizes.items())})"
