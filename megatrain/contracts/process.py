"""Who a worker is among all workers: torchrun's environment variables, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.contracts.errors import TopologyError

_REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Process:
    """This worker's place among all workers. `init_method` is None when it is alone."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    incarnation: int = 0
    init_method: str | None = None


def process_from_environment(environment: Mapping[str, str]) -> Process:
    """Read torchrun's variables; without any of them, the process is alone.

    Raises: TopologyError when only some of them are set or one is no number.
    """
    present = [name for name in _REQUIRED if environment.get(name)]
    if "RANK" not in present and "WORLD_SIZE" not in present:
        return Process()
    missing = [name for name in _REQUIRED if name not in present]
    if missing:
        raise TopologyError(
            f"environment has {', '.join(present)} but not {', '.join(missing)}; start workers with torchrun, or unset "
            f"{', '.join(present)} to train in one process"
        )
    try:
        return Process(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE") or 1),
            incarnation=int(environment.get("TORCHELASTIC_RESTART_COUNT") or 0),
            init_method="env://",
        )
    except ValueError as error:
        raise TopologyError(f"torchrun's environment holds a value that is no number: {error}") from error
