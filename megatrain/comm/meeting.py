"""Which round of the job the workers are, where their launchers count restarts each for itself.

A torchrun agent that takes a dead one's place has counted no restart, and its peers have. Workers that looked for each
other below their own counts would never meet, so rank 0 says what counts, to every rank that is there now. The store
may be as old as the job: random names, new in each process, separate its keys from those that earlier workers left.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import timedelta
from uuid import uuid4

from torch import distributed as dist

from megatrain.contracts.errors import CommunicationError
from megatrain.contracts.process import Process

_POLL_S = 0.01
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one round meet: keys below `prefix`, which no other round uses."""

    process: Process
    store: dist.Store
    prefix: str


def told_by_rank_0(meeting: Meeting, name: str, value: str) -> str:
    """Return rank 0's `value` of that name.

    Communication: rank 0 writes a key of the store, the others wait for it, within the store's time limit.
    Raises: CommunicationError when rank 0 does not say.
    """
    process, key = meeting.process, f"{meeting.prefix}/told/{name}"
    try:
        if process.rank == 0:
            meeting.store.set(key, value)
            return value
        return meeting.store.get(key).decode()
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {process.rank} at {process.store or process.init_method}: rank 0 does not say its {name}: {error}"
        ) from error


def agree_on_round(process: Process, store: dist.Store, *, job: str, timeout_s: float) -> Meeting:
    """Return the meeting that rank 0 calls, with its round: of the meetings at this store and the restarts that
    rank 0 has counted, the greater number.

    Communication: every rank writes and reads three keys of the store; rank 0 those of all. Blocks up to `timeout_s`.
    Raises: CommunicationError naming the ranks that have not come.
    """
    root, own = f"{job}/meeting", uuid4().hex
    if process.rank == 0:
        number = max(store.add(f"{root}/count", 1) - 1, process.round)
        _call(store, root, f"{number}/{own}", process, timeout_s)
        told = f"{number}/{own}"
    else:
        store.set(f"{root}/arrived/{process.rank}", own)
        try:
            store.wait([f"{root}/called/{own}"], timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise could_not_meet(process, timeout_s, f"rank 0 did not answer: {error}") from error
        told = store.get(f"{root}/called/{own}").decode()
        store.set(f"{root}/seen/{told}/{own}", b"1")
    number_text, _, _ = told.partition("/")
    agreed = replace(process, round=int(number_text), is_round_common=True)
    return Meeting(agreed, store, f"{job}/{told}")


def _call(store: dist.Store, root: str, told: str, process: Process, timeout_s: float) -> None:
    """Tell every rank, until each has seen it; the name a rank left may be that of a dead worker at first."""
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
                store.set(f"{root}/called/{name}", told)
                names[rank] = name
        missing = [
            rank for rank in missing if rank not in names or not store.check([f"{root}/seen/{told}/{names[rank]}"])
        ]
        if missing and time.monotonic() > deadline:
            named = ", ".join(map(str, missing[:_MOST_NAMED])) + (", ..." if len(missing) > _MOST_NAMED else "")
            raise could_not_meet(process, timeout_s, f"no sign of ranks {named}")
        if missing:
            time.sleep(_POLL_S)


def could_not_meet(process: Process, timeout_s: float, cause: object) -> CommunicationError:
    """Return what to raise when ranks did not come."""
    return CommunicationError(
        f"rank {process.rank} could not meet all {process.world_size} ranks at {process.store or process.init_method} "
        f"within runtime.init_timeout_s={timeout_s:g}: {cause}"
    )
