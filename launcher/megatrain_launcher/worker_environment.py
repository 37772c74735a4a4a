"""The environment of a worker: torchrun's variables, so that programs written for torchrun run, and the host's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from megatrain.contracts.process import HOST_VARIABLE, ROLLBACK_VARIABLE, ROUND_VARIABLE
from megatrain.contracts.records.record import encode
from megatrain_launcher.interfaces import Assignment

MAX_RESTARTS: Final = 10**8
"""The limit on restarts that torch requires; never reached, because the driver limits restarts."""
ROLE: Final = "default"


def server_environment(base: Mapping[str, str], num_workers: int) -> dict[str, str]:
    """Return the environment of the process that forks the workers: one thread per worker if there are several."""
    environment = dict(base)
    if num_workers > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: otherwise each worker uses all cores
    return environment


def worker_environment(base: Mapping[str, str], job: str, assignment: Assignment, local_rank: int) -> dict[str, str]:
    """Return the whole environment of one worker of a round."""
    a_round, part = assignment.round, assignment.part
    rank = part.first_rank + local_rank
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **base,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(a_round.world_size),
        "LOCAL_WORLD_SIZE": str(part.num_workers),
        "GROUP_RANK": str(a_round.hosts.index(part)),
        "GROUP_WORLD_SIZE": str(len(a_round.hosts)),
        "ROLE_NAME": ROLE,
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(a_round.world_size),
        "MASTER_ADDR": a_round.store_address,
        "MASTER_PORT": str(a_round.store_port),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": str(a_round.number),
        "TORCHELASTIC_MAX_RESTARTS": str(MAX_RESTARTS),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        HOST_VARIABLE: part.host,
        ROUND_VARIABLE: str(a_round.number),
        ROLLBACK_VARIABLE: "" if a_round.rollback is None else encode(a_round.rollback).decode(),
    }
