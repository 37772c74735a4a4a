"""Where a rank sits in the 3D grid: the pure arithmetic of tensor, data and pipeline parallelism.

rank = (pp * dp_size + dp) * tp_size + tp. Tensor parallel is innermost so that it stays inside a host; data parallel
comes next, because MegaScale sec. 3.2 gives data-parallel groups placement priority over pipeline groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.contracts.errors import TopologyError


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A rank's place along each axis of the mesh."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of the three axes.

    Raises: TopologyError when a size is below 1.
    """

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp_size", "pp_size", "dp_size"):
            if getattr(self, axis) < 1:
                raise TopologyError(f"parallel.{axis}={getattr(self, axis)} must be at least 1")

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size * self.dp_size

    def coordinate(self, rank: int) -> Coordinate:
        """Return the place of `rank`. Raises: TopologyError when it is not one of this layout's ranks."""
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} is outside the layout of {self.world_size} ranks ({self})")
        tp = rank % self.tp_size
        dp = rank // self.tp_size % self.dp_size
        pp = rank // (self.tp_size * self.dp_size)
        return Coordinate(dp=dp, pp=pp, tp=tp)

    def rank_of(self, coordinate: Coordinate) -> int:
        return (coordinate.pp * self.dp_size + coordinate.dp) * self.tp_size + coordinate.tp

    def tp_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the other shards of this rank's layers, in tp order."""
        at = self.coordinate(rank)
        return tuple(self.rank_of(Coordinate(at.dp, at.pp, tp)) for tp in range(self.tp_size))

    def dp_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same shard and see other samples, in dp order."""
        at = self.coordinate(rank)
        return tuple(self.rank_of(Coordinate(dp, at.pp, at.tp)) for dp in range(self.dp_size))

    def pp_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of this rank's pipeline, first stage first."""
        at = self.coordinate(rank)
        return tuple(self.rank_of(Coordinate(at.dp, pp, at.tp)) for pp in range(self.pp_size))

    def __str__(self) -> str:
        return f"tp_size={self.tp_size} pp_size={self.pp_size} dp_size={self.dp_size}"
