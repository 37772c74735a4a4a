"""Joining and leaving the job: the world group, its store and its backend.

Each incarnation of a job (each restart) uses a key prefix of its own in the store, so that what a dead incarnation
left there can never be mistaken for a peer.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch import distributed as dist

from megatrain.comm.incarnation import Meeting, agree_on_incarnation, could_not_meet
from megatrain.contracts.process import Process


def meet(process: Process, *, job: str, timeout_s: float) -> Meeting | None:
    """Go to the store where the workers meet, and agree there on the incarnation if they do not know it.

    Returns None when the process is alone.
    Communication: connects to the store; see agree_on_incarnation. Blocks up to `timeout_s`.
    Raises: CommunicationError naming the store and the ranks awaited.
    """
    if process.init_method is None:
        return None
    timeout = timedelta(seconds=timeout_s)
    try:
        store, _, _ = next(
            iter(dist.rendezvous(process.init_method, process.rank, process.world_size, timeout=timeout))
        )
        store.set_timeout(timeout)
        if not process.is_incarnation_common:
            return agree_on_incarnation(process, store, job=job, timeout_s=timeout_s)
    except (RuntimeError, ValueError) as error:
        raise could_not_meet(process, timeout_s, error) from error
    return Meeting(process, store, f"{job}/{process.incarnation}")


def join(meeting: Meeting | None, device: torch.device, *, timeout_s: float, network_interface: str = "") -> None:
    """Create the world group: NCCL on CUDA devices, gloo on CPUs. Nothing when the process is alone.

    Communication: rendezvous of all ranks at the store; blocks up to `timeout_s`.
    Raises: CommunicationError naming the store and the ranks awaited.
    """
    if meeting is None:
        return
    process = meeting.process
    if network_interface:
        # the libraries read these names and offer no other way to choose a NIC
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = network_interface
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(meeting.prefix, meeting.store),
            rank=process.rank,
            world_size=process.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise could_not_meet(process, timeout_s, error) from error


def join_fake(rank: int, world_size: int) -> None:
    """Create a world group whose collectives do nothing: dry runs of a layout of any size in one process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # loaded for dry runs only

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def set_world_timeout(seconds: float) -> None:
    """Bound every later exchange on the world group."""
    if dist.is_initialized():
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), None)


def leave() -> None:
    """Destroy the world group and all groups made from it."""
    if dist.is_initialized():
        dist.destroy_process_group()
