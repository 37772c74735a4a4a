"""Joining and leaving the job: the rendezvous of its ranks, and torch's world group.

Each round of a job (under torchrun, each restart) uses its own key prefix in the store, so that no worker uses the keys
of an earlier round.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch import distributed as dist

from megatrain.comm.rendezvous import Rendezvous, agree_on_round, rendezvous_error
from megatrain.contracts.process import Process

_UNCONNECTED = "unconnected"
_FEW_REQUESTS = {"GLOO_ENABLE_STORE_V2_API": "1", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"}
"""With these settings gloo reads the addresses of 128 peers in one request, instead of two requests per peer, and an
address says only where a rank listens; by default it also contains a number for each peer."""


class _Unconnected(dist.ProcessGroup):
    """A group of all ranks without connections: every collective on it is an error."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's types lack this constructor


def open_rendezvous(process: Process, *, job: str, timeout_s: float) -> Rendezvous | None:
    """Connect to the store of the ranks, and agree there on the round unless all ranks already have the same one.

    Returns None for a job of one process.
    Communication: connects to the store; see agree_on_round. Blocks up to `timeout_s`.
    Raises: CommunicationError naming the store and the ranks that have not arrived.
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
        raise rendezvous_error(process, timeout_s, error) from error
    return Rendezvous(process, store, f"{job}/{process.round}")


def join(rendezvous: Rendezvous | None, *, network_interface: str = "") -> None:
    """Create torch's world group. Does nothing for a job of one process.

    torch requires a world group. This one has the store and the list of ranks, but connects none of them: an exchange
    with all ranks goes axis by axis, and connecting 12,288 ranks to each other would take 75 million connections.
    Communication: none.
    """
    if rendezvous is None:
        return
    # the libraries read these environment variables and offer no other way to choose an interface
    if network_interface:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = network_interface
    os.environ.update(_FEW_REQUESTS)
    if not hasattr(dist.Backend, _UNCONNECTED.upper()):
        dist.Backend.register_backend(_UNCONNECTED, _Unconnected, devices=["cpu", "cuda"])
    dist.init_process_group(
        _UNCONNECTED,
        store=dist.PrefixStore(rendezvous.prefix, rendezvous.store),
        rank=rendezvous.process.rank,
        world_size=rendezvous.process.world_size,
    )


def leave() -> None:
    """Destroy all groups."""
    if dist.is_initialized():
        dist.destroy_process_group()
