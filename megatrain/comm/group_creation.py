"""Creating one group: only its members meet at the store, below a name that they all compute.

torch's `new_group` numbers groups as each rank counts them, so ranks that are members of different groups would have to
be kept in step; it also takes its place in a world group. Here the plan names the group, and the world has none.
Source of what a creation asks of the store: ADR 0032.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatrain.comm.group import brief
from megatrain.comm.group_plan import PlannedGroup
from megatrain.comm.priorities import nccl_options
from megatrain.contracts.errors import CommunicationError

GLOO, NCCL, FAKE = "gloo", "nccl", "fake"


def create_process_group(
    planned: PlannedGroup, rank: int, device: torch.device, store: dist.Store, *, timeout_s: float
) -> dist.ProcessGroup:
    """Create a group of several ranks, this one among them, whose members meet at `store`.

    On a GPU the links are the exception: each pair of stages connects at its first message, on a communicator of its
    own. torch puts the messages of a communicator that is there from the start into one queue, where a receive that is
    posted ahead would hold up the sends behind it.
    Communication: the members' rendezvous at the store; blocks up to `timeout_s`.
    Raises: CommunicationError naming the group and the ranks that have not come to it.
    """
    backend, timeout = _backend(planned, device), timedelta(seconds=timeout_s)
    try:
        if backend == NCCL:
            _await_members(store, planned, rank, timeout)
        group, _ = c10d._new_process_group_helper(
            len(planned.ranks),
            planned.ranks.index(rank),
            list(planned.ranks),
            dist.Backend(backend),
            store,
            c10d.GroupName(planned.key),
            backend_options=nccl_options(planned.name, timeout) if backend == NCCL else None,
            timeout=timeout,
            device_id=device if backend == NCCL and not planned.is_link else None,
            group_desc=planned.name,
        )
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {rank} could not create group {planned.name} of ranks {brief(planned.ranks)} within "
            f"runtime.init_timeout_s={timeout_s:g}; {_who_is_missing(store, planned, backend)}: {error}"
        ) from error
    c10d._world.pg_group_ranks[group] = {member: index for index, member in enumerate(planned.ranks)}
    return group


def _backend(planned: PlannedGroup, device: torch.device) -> str:
    if dist.get_backend() == FAKE:
        return FAKE
    return NCCL if device.type == "cuda" and not planned.is_on_host else GLOO


def _await_members(store: dist.Store, planned: PlannedGroup, rank: int, timeout: timedelta) -> None:
    """Wait until all members are here: NCCL itself would wait for them without end.

    Communication: one key written, one request that waits for those of all members.
    """
    keys = _arrival_keys(planned, NCCL)
    store.set(keys[planned.ranks.index(rank)], b"1")
    store.wait(keys, timeout)


def _arrival_keys(planned: PlannedGroup, backend: str) -> list[str]:
    """Return, by member, the key that is there once it has come: for gloo, its address as gloo itself writes it."""
    place = f"{planned.key}//cpu//0" if backend == GLOO else f"{planned.key}/arrived"
    return [f"{place}/{index}" for index in range(len(planned.ranks))]


def _who_is_missing(store: dist.Store, planned: PlannedGroup, backend: str) -> str:
    """Return in words which members have not come, as far as the store can still tell."""
    by_key = dict(zip(_arrival_keys(planned, backend), planned.ranks, strict=True))
    try:
        missing = tuple(by_key[key] for key in _absent(store, list(by_key)))
    except RuntimeError:
        return "one of them is missing or stuck, and the store does not answer"
    if not missing:
        return "all of them have come, and one cannot be reached"
    return f"without a sign of rank{'s' if len(missing) > 1 else ''} {brief(missing)}"


def _absent(store: dist.Store, keys: Sequence[str]) -> list[str]:
    """Return the keys that the store does not have.

    Communication: one request where it has all, about 2 log2(len(keys)) for each that is absent.
    """
    if store.check(list(keys)):
        return []
    if len(keys) == 1:
        return list(keys)
    half = len(keys) // 2
    return _absent(store, keys[:half]) + _absent(store, keys[half:])
