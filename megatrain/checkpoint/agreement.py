"""What all ranks must know alike of storage and of the arena: one rank's error is every rank's, or they hang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatrain.comm.host_groups import HostGroups
from megatrain.contracts.errors import CheckpointError


@contextmanager
def raised_by_all(host: HostGroups, rank: int) -> Iterator[None]:
    """Raise the CheckpointError of any rank's block on every rank, the lowest rank's where there are several.

    Communication: one agreement, when the block has ended.
    """
    problem = None
    try:
        yield
    except CheckpointError as error:
        problem = str(error)
    raise_for_all(host, rank, problem)


def raise_for_all(host: HostGroups, rank: int, problem: str | None) -> None:
    """Raise the first rank's problem on every rank, nothing where no rank has one.

    Communication: one agreement. Raises: CheckpointError.
    """
    first = host.agree(rank, problem)
    if first is not None:
        raise CheckpointError(first)


def asked_by_first(host: HostGroups, rank: int, ask: Callable[[], Any]) -> Any:
    """Return on every rank what `ask` returns on rank 0, which alone calls it. The answer must fit into JSON.

    Communication: one broadcast.
    Raises: CheckpointError on every rank, when `ask` does.
    """
    answer, problem = None, None
    if rank == 0:
        try:
            answer = ask()
        except CheckpointError as error:
            problem = str(error)
    answer, problem = host.broadcast_json([answer, problem])
    if problem is not None:
        raise CheckpointError(problem)
    return answer
