"""Joining and leaving the job: who am I, where is the store, which backend.

Each incarnation of a job (each restart) uses a key prefix of its own in the store, so that what a dead incarnation
left there can never be mistaken for a peer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist

from megatrain.contracts.errors import CommunicationError, TopologyError

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


def join(process: Process, device: torch.device, *, job: str, timeout_s: float, network_interface: str = "") -> None:
    """Create the world group: NCCL on CUDA devices, gloo on CPUs. Nothing when the process is alone.

    Communication: rendezvous of all ranks at the store; blocks up to `timeout_s`.
    Raises: CommunicationError naming the store and the ranks awaited.
    """
    if process.init_method is None:
        return
    if network_interface:
        # the libraries read these names and offer no other way to choose a NIC
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = network_interface
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, world_size = next(
            iter(dist.rendezvous(process.init_method, process.rank, process.world_size, timeout=timeout))
        )
        store.set_timeout(timeout)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"{job}/{process.incarnation}", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(
            f"rank {process.rank} could not meet the other {process.world_size - 1} ranks at {process.init_method} within "
            f"runtime.init_timeout_s={timeout_s:g}: {error}"
        ) from error


def join_fake(rank: int, world_size: int) -> None:
    """Create a world group whose collectives do nothing: dry runs of a layout of any size in one process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # loaded for dry runs only

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def leave() -> None:
    """Destroy the world group and all groups made from it."""
    if dist.is_initialized():
        dist.destroy_process_group()
