"""Joining and leaving the job: the store where workers meet, and the place of this one among all ranks.

Each round of a job (under torchrun, each restart) uses a key prefix of its own in the store, so that what a dead round
left there can never be mistaken for a peer.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch import distributed as dist

from megatrain.comm.meeting import Meeting, agree_on_round, could_not_meet
from megatrain.contracts.process import Process

_UNCONNECTED = "unconnected"
_FEW_REQUESTS = {"GLOO_ENABLE_STORE_V2_API": "1", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"}
"""gloo reads the addresses of 128 peers in one request, in place of two requests a peer; and an address says where a
rank listens, in place of that and a number for each peer."""


class _Unconnected(dist.ProcessGroup):
    """All ranks, without a connection: every collective on it is an error."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)


def meet(process: Process, *, job: str, timeout_s: float) -> Meeting | None:
    """Go to the store where the workers meet, and agree there on the round if they do not know it.

    Returns None when the process is alone.
    Communication: connects to the store; see agree_on_round. Blocks up to `timeout_s`.
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
        if not process.is_round_common:
            return agree_on_round(process, store, job=job, timeout_s=timeout_s)
    except (RuntimeError, ValueError) as error:
        raise could_not_meet(process, timeout_s, error) from error
    return Meeting(process, store, f"{job}/{process.round}")


def join(meeting: Meeting | None, *, network_interface: str = "") -> None:
    """Take this process's place among all ranks. Nothing when the process is alone.

    torch wants a world group; ours knows the store and the ranks and connects none of them: whoever speaks to all goes
    along one axis after the other, and 12,288 ranks connected to each other would be 75 million connections.
    Communication: none.
    """
    if meeting is None:
        return
    # the libraries read these names and offer no other way to choose
    if network_interface:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = network_interface
    os.environ.update(_FEW_REQUESTS)
    if not hasattr(dist.Backend, _UNCONNECTED.upper()):
        dist.Backend.register_backend(_UNCONNECTED, _Unconnected, devices=["cpu", "cuda"])
    dist.init_process_group(
        _UNCONNECTED,
        store=dist.PrefixStore(meeting.prefix, meeting.store),
        rank=meeting.process.rank,
        world_size=meeting.process.world_size,
    )


def join_fake(rank: int, world_size: int) -> None:
    """Create a world group whose collectives do nothing: dry runs of a layout of any size in one process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # loaded for dry runs only

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def leave() -> None:
    """Destroy all groups."""
    if dist.is_initialized():
        dist.destroy_process_group()
