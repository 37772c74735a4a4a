"""A worker's rank among all workers, read once from torchrun's environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.contracts.errors import CoordinationError, TopologyError
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import Rollback

_MAX_RANKS = 10**7
_MAX_RESTARTS = 10**8
HOST_VARIABLE = "MEGATRAIN_HOST"
"""Set by `megatrain launch` for its workers, because a machine may act as several hosts."""
ROUND_VARIABLE = "MEGATRAIN_ROUND"
"""Set by `megatrain launch` and by megatrain's rendezvous under torchrun: the same for all workers of a round."""
ROUND_COUNTER_VARIABLE = "MEGATRAIN_ROUND_COUNTER"
"""Set with ROUND_VARIABLE: the id of the etcd cluster that counts the rounds. Numbers of two clusters are unrelated."""
ROLLBACK_VARIABLE = "MEGATRAIN_ROLLBACK"
"""Set by `megatrain launch` for its workers when their round has a Rollback: its record as JSON."""
_COUNT_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
_REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Process:
    """This worker's rank among all workers. `init_method` is None for a single process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    round: int = 0
    init_method: str | None = None
    store: str = ""
    """The address of the store through which the workers find each other, for messages."""
    host: str = ""
    """The launcher's name for this host; empty under torchrun or in a single process."""
    is_round_common: bool = True
    """Whether all ranks have the same round number. Each of torchrun's agents counts restarts since its own start."""
    round_counter: str = ""
    """The counter that `round` belongs to; empty without megatrain's launcher or rendezvous."""
    rollback: Rollback | None = None
    """The rollback that the launcher requests before the state is loaded."""


def process_from_environment(environment: Mapping[str, str]) -> Process:
    """Read torchrun's variables. Without RANK and WORLD_SIZE, the process is the only one.

    Raises: TopologyError when only some of the variables are set, or a value is impossible.
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
    world_size = _number(environment, "WORLD_SIZE", 1, _MAX_RANKS)
    local_rank = _number(environment, "LOCAL_RANK", 0, world_size - 1)
    _number(environment, "MASTER_PORT", 1, 65535)
    local_world_size = _number(environment, "LOCAL_WORLD_SIZE", local_rank + 1, world_size, default=local_rank + 1)
    has_round = bool(environment.get(ROUND_VARIABLE))
    has_own_count = not has_round and bool(environment.get(_COUNT_VARIABLE)) and local_world_size < world_size
    return Process(
        rank=_number(environment, "RANK", 0, world_size - 1),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        round=_number(environment, ROUND_VARIABLE if has_round else _COUNT_VARIABLE, 0, _MAX_RESTARTS, default=0),
        is_round_common=not has_own_count,
        init_method="env://",
        store=f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}",
        host=environment.get(HOST_VARIABLE, ""),
        # "" would mean that torchrun counts the rounds
        round_counter=(environment.get(ROUND_COUNTER_VARIABLE) or "etcd") if has_round else "",
        rollback=_rollback(environment.get(ROLLBACK_VARIABLE, "")),
    )


def _rollback(text: str) -> Rollback | None:
    if not text:
        return None
    try:
        return decode(Rollback, text, f"environment variable {ROLLBACK_VARIABLE}")
    except CoordinationError as error:
        raise TopologyError(f"{error}; only `megatrain launch` may set it") from error


def _number(environment: Mapping[str, str], name: str, least: int, most: int, default: int | None = None) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not least <= int(text) <= most:
        raise TopologyError(
            f"environment variable {name}={text!r} must be a whole number from {least} to {most}; start workers with "
            "torchrun, or unset RANK and WORLD_SIZE to train in one process"
        )
    return int(text)
