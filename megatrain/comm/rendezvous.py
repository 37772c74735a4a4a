"""How the ranks of one round find each other: one of torch's key-value stores, and keys that no other round uses.

Under torchrun, each agent counts restarts by itself. An agent that replaces a dead one counts from 0, while the other
agents continue their counts. Ranks with different counts as keys would never find each other, so rank 0 chooses the
round and sends its number to every rank. The store may be as old as the job, so each process chooses a random name,
which separates its keys from those of earlier processes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import timedelta
from uuid import uuid4

from torch import distributed as dist

from megatrain.comm.group import MAX_NAMED
from megatrain.contracts.errors import CommunicationError
from megatrain.contracts.process import Process
from megatrain.formatting import ranks_text

_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one round find each other: keys of `store` under `prefix`, which no other round uses."""

    process: Process
    store: dist.Store
    prefix: str


def value_of_rank_0(rendezvous: Rendezvous, name: str, value: str) -> str:
    """Return rank 0's `value` for `name` on every rank.

    Communication: rank 0 writes a key of the store, and the others wait for it, within the store's time limit.
    Raises: CommunicationError when rank 0 does not write the key.
    """
    process, key = rendezvous.process, f"{rendezvous.prefix}/values/{name}"
    try:
        if process.rank == 0:
            rendezvous.store.set(key, value)
            return value
        return rendezvous.store.get(key).decode()
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {process.rank} at {process.store or process.init_method}: rank 0 has not announced its {name}: "
            f"{error}"
        ) from error


def agree_on_round(process: Process, store: dist.Store, *, job: str, timeout_s: float) -> Rendezvous:
    """Return the rendezvous. Rank 0 chooses its round: the number of earlier rounds at this store, or the number of
    restarts that rank 0 has counted, whichever is greater.

    Communication: every rank except 0 writes two keys of the store and reads one; rank 0 reads and writes the keys of
    all ranks. Blocks up to `timeout_s`.
    Raises: CommunicationError naming the ranks that have not arrived.
    """
    root, own_name = f"{job}/rendezvous", uuid4().hex
    if process.rank == 0:
        number = max(store.add(f"{root}/count", 1) - 1, process.round)
        announced = f"{number}/{own_name}"
        _announce(store, root, announced, process, timeout_s)
    else:
        store.set(f"{root}/arrived/{process.rank}", own_name)
        key = f"{root}/announced/{own_name}"
        try:
            store.wait([key], timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise rendezvous_error(process, timeout_s, f"rank 0 did not answer: {error}") from error
        announced = store.get(key).decode()
        store.set(f"{root}/confirmed/{announced}/{own_name}", "1")
    number_text, _, _ = announced.partition("/")
    agreed = replace(process, round=int(number_text), is_round_common=True)
    return Rendezvous(agreed, store, f"{job}/{announced}")


def _announce(store: dist.Store, root: str, announced: str, process: Process, timeout_s: float) -> None:
    """Announce the round until each rank has confirmed it. A rank's key may at first name an earlier worker.

    announced: the round's number and rank 0's random name.
    Raises: CommunicationError naming the ranks that have not confirmed the round in time.
    """
    deadline = time.monotonic() + timeout_s
    names: dict[int, str] = {}
    missing = list(range(1, process.world_size))
    while missing:
        for rank in missing:
            key = f"{root}/arrived/{rank}"
            if not store.check([key]):
                continue
            name = store.get(key).decode()
            if names.get(rank) != name:
                store.set(f"{root}/announced/{name}", announced)
                names[rank] = name
        missing = [
            rank
            for rank in missing
            if rank not in names or not store.check([f"{root}/confirmed/{announced}/{names[rank]}"])
        ]
        if missing and time.monotonic() > deadline:
            raise rendezvous_error(process, timeout_s, f"no sign of {ranks_text(missing, MAX_NAMED)}")
        if missing:
            time.sleep(_POLL_S)


def rendezvous_error(process: Process, timeout_s: float, cause: object) -> CommunicationError:
    """Return the error for ranks that did not arrive in time."""
    return CommunicationError(
        f"rank {process.rank} could not meet all {process.world_size} ranks at {process.store or process.init_method} "
        f"within runtime.init_timeout_s={timeout_s:g}: {cause}"
    )
