"""Agreements of all ranks about storage and the arena. All ranks raise the error of one rank, so that none hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatrain.comm.cpu_groups import CpuGroups
from megatrain.contracts.errors import CheckpointError


@contextmanager
def raised_by_all(cpu_groups: CpuGroups, rank: int) -> Iterator[None]:
    """If the block raises CheckpointError on any rank, raise the error of the lowest such rank on every rank.

    Communication: one agreement, when the block has ended.
    """
    problem = None
    try:
        yield
    except CheckpointError as error:
        problem = str(error)
    raise_for_all(cpu_groups, rank, problem)


def raise_for_all(cpu_groups: CpuGroups, rank: int, problem: str | None) -> None:
    """Raise the lowest rank's problem on every rank; do nothing when no rank has one.

    Communication: one agreement. Raises: CheckpointError.
    """
    first = cpu_groups.agree(rank, problem)
    if first is not None:
        raise CheckpointError(first)


def result_of_rank_0(cpu_groups: CpuGroups, rank: int, call: Callable[[], Any]) -> Any:
    """Run `call` on rank 0 only and return its result on every rank. JSON must be able to represent the result.

    Communication: one broadcast.
    Raises: CheckpointError on every rank, when `call` raises it.
    """
    result, problem = None, None
    if rank == 0:
        try:
            result = call()
        except CheckpointError as error:
            problem = str(error)
    result, problem = cpu_groups.broadcast_json([result, problem])
    if problem is not None:
        raise CheckpointError(problem)
    return result
