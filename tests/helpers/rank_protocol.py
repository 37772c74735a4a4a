"""The messages between the pool and its ranks: a job in one direction, a result or a failure in the other (pickled)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankContext:
    """The information that a rank function needs to join its peers: `init_method` is a rendezvous of this run only."""

    rank: int
    world_size: int
    init_method: str


@dataclass(frozen=True, slots=True)
class FailedRank:
    """The reason why one rank did not return. `time_ns` (monotonic, one clock for all ranks) shows which rank failed
    first."""

    rank: int
    time_ns: int
    description: str
    is_deadline: bool = False
    """Whether it did not return in time."""


@dataclass(frozen=True, slots=True)
class RankJob:
    """One run as a rank receives it. The function is sent by its name; `import_path` is the sys.path that finds it."""

    module_name: str
    qualified_name: str
    import_path: tuple[str, ...]
    context: RankContext
    args: bytes
    timeout_s: float
    stack_file: str
