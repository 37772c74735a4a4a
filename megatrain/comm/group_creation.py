"""Creating one group: only its members meet at the store, under a name that they all compute.

torch's `new_group` numbers groups by each rank's own count, so ranks with different groups would have to keep their
counts equal. It also places each group within a world group. Here the plan names the group, and no group connects all
ranks. gloo.py and nccl.py add what each library needs.
ADR 0032 lists the requests that a creation sends to the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatrain.comm.group import MAX_NAMED
from megatrain.comm.group_plan import PlannedGroup
from megatrain.contracts.errors import CommunicationError
from megatrain.formatting import ranks_text


def new_process_group(
    planned: PlannedGroup,
    rank: int,
    backend: str,
    store: dist.Store,
    timeout: timedelta,
    *,
    options: Any = None,
    device: torch.device | None = None,
) -> dist.ProcessGroup:
    """Create a group of several ranks, including this one.

    backend: torch's name of the library. device: if given, the members connect at once over this device.
    Communication: the members' rendezvous at the store; blocks up to `timeout`.
    Raises: RuntimeError from torch.
    """
    group, _ = c10d._new_process_group_helper(
        len(planned.ranks),
        planned.ranks.index(rank),
        list(planned.ranks),
        dist.Backend(backend),
        store,
        c10d.GroupName(planned.key),
        backend_options=options,
        timeout=timeout,
        device_id=device,
        group_desc=planned.name,
    )
    c10d._world.pg_group_ranks[group] = {member: index for index, member in enumerate(planned.ranks)}
    return group


@contextmanager
def missing_members_error(
    planned: PlannedGroup, rank: int, store: dist.Store, arrivals: Sequence[str], timeout: timedelta
) -> Iterator[None]:
    """Turn a failed creation into a CommunicationError that names the group and the ranks that have not arrived.

    arrivals: for each member, the key that is in the store once the member has arrived.
    """
    try:
        yield
    except RuntimeError as error:
        missing = _missing_text(store, dict(zip(arrivals, planned.ranks, strict=True)))
        raise CommunicationError(
            f"rank {rank} could not create group {planned.name} of {ranks_text(planned.ranks, MAX_NAMED)} within "
            f"runtime.init_timeout_s={timeout.total_seconds():g}; {missing}: {error}"
        ) from error


def _missing_text(store: dist.Store, by_key: dict[str, int]) -> str:
    """Return a text that names the members that have not arrived, as far as the store still answers."""
    try:
        missing = tuple(by_key[key] for key in _absent(store, list(by_key)))
    except RuntimeError:
        return "one of them is missing or stuck, and the store does not answer"
    if not missing:
        return "all of them have arrived, but one cannot be reached"
    return f"no sign of {ranks_text(missing, MAX_NAMED)}"


def _absent(store: dist.Store, keys: Sequence[str]) -> list[str]:
    """Return the keys that the store does not have.

    Communication: one request if the store has all keys, about 2 log2(len(keys)) requests for each absent key.
    """
    if store.check(list(keys)):
        return []
    if len(keys) == 1:
        return list(keys)
    half = len(keys) // 2
    return _absent(store, keys[:half]) + _absent(store, keys[half:])
