"""The input of every check."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config.config import Config
from megatrain.contracts.layout import Layout


@dataclass(frozen=True, slots=True)
class Context:
    """A configuration in which each key is within its own range, and the world size if it is known."""

    config: Config
    world_size: int | None
    doubtful: frozenset[str]
    """Keys that hold a stand-in for a wrong or missing value."""

    def are_known(self, *keys: str) -> bool:
        """Return whether these keys hold the values that were given, and no stand-in."""
        return self.doubtful.isdisjoint(keys)

    @property
    def dp_size(self) -> int | None:
        """The data-parallel size if it is given, or follows from the world size; else None."""
        parallel = self.config.parallel
        if not self.are_known("parallel.dp_size"):
            return None
        if parallel.dp_size:
            return parallel.dp_size
        is_replica_known = self.are_known(*(f"parallel.{name}" for name in parallel.replica_sizes))
        if self.world_size is None or not is_replica_known or self.world_size % parallel.ranks_per_replica:
            return None
        return self.world_size // parallel.ranks_per_replica

    @property
    def num_sample_parts(self) -> int | None:
        """Into how many parts the samples of a step are dealt, if the data-parallel size is known; else None."""
        return None if self.layout is None else self.layout.num_sample_parts

    @property
    def layout(self) -> Layout | None:
        """The layout, if the data-parallel size is known; else None."""
        if self.dp_size is None:
            return None
        return Layout(**{**self.config.parallel.sizes, "dp_size": self.dp_size})
