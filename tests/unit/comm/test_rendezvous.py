"""Workers whose agents counted restarts differently still connect, and none connects to the keys of a dead worker."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch import distributed as dist

from megatrain.comm.rendezvous import Rendezvous, agree_on_round
from megatrain.contracts.errors import CommunicationError
from megatrain.contracts.process import Process
from tests.helpers.waiting import DEADLINE_S

JOB = "rendezvous"


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def process(rank: int, count: int, world_size: int = 4) -> Process:
    return Process(rank, world_size, 0, 1, count, "env://", "node-0:29500", is_round_common=False)


def open_all(store: dist.Store, counts: list[int]) -> list[Rendezvous]:
    with ThreadPoolExecutor(len(counts)) as pool:
        futures: list[Future[Rendezvous]] = [
            pool.submit(agree_on_round, process(rank, count, len(counts)), store, job=JOB, timeout_s=DEADLINE_S)
            for rank, count in enumerate(counts)
        ]
        return [future.result() for future in futures]


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [3, 3, 0, 0], [0, 0, 3, 3]])
def test_all_take_the_round_of_rank_0(store: dist.Store, counts: list[int]) -> None:
    opened = open_all(store, counts)
    assert {rendezvous.process.round for rendezvous in opened} == {counts[0]}
    assert len({rendezvous.prefix for rendezvous in opened}) == 1
    assert [rendezvous.process.rank for rendezvous in opened] == [0, 1, 2, 3]
    assert all(rendezvous.process.is_round_common for rendezvous in opened)


def test_store_that_outlives_workers_never_mixes_rendezvous(store: dist.Store) -> None:
    """The same if the worker of another agent is rank 0, which has counted fewer restarts."""
    opened = [open_all(store, counts) for counts in ([0, 0, 0], [1, 1, 0], [0, 1, 2], [1, 0, 3])]
    assert len({ranks[0].prefix for ranks in opened}) == len(opened)
    numbers = [ranks[0].process.round for ranks in opened]
    assert numbers == sorted(set(numbers)), "newer workers have higher numbers"


def test_ranks_that_died_while_waiting_are_ignored(store: dist.Store) -> None:
    """Rank 0 and rank 2 never arrived in the first attempt; the keys that ranks 1 and 3 left there are stale."""
    for rank in (1, 3):
        with pytest.raises(CommunicationError, match=f"rank {rank} could not meet all 4 ranks at node-0:29500"):
            agree_on_round(process(rank, 0), store, job=JOB, timeout_s=0.05)
    opened = open_all(store, [1, 1, 1, 1])
    assert len({rendezvous.prefix for rendezvous in opened}) == 1


def test_rank_0_names_who_is_missing(store: dist.Store) -> None:
    with pytest.raises(CommunicationError, match=r"init_timeout_s=0\.05: no sign of ranks 1-3$"):
        agree_on_round(process(0, 0), store, job=JOB, timeout_s=0.05)
    with pytest.raises(CommunicationError, match=r"no sign of rank 1$"):
        agree_on_round(process(0, 0, 2), store, job=JOB, timeout_s=0.05)
    with pytest.raises(CommunicationError, match=r"no sign of ranks 1-8 and 91 more$"):
        agree_on_round(process(0, 0, 100), store, job=JOB, timeout_s=0.05)


def test_only_the_round_changes_between_rendezvous(store: dist.Store) -> None:
    own = process(1, 5, 2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(agree_on_round, process(0, 2, 2), store, job=JOB, timeout_s=DEADLINE_S)
        agreed = agree_on_round(own, store, job=JOB, timeout_s=DEADLINE_S)
        first.result()
    assert agreed.process == dataclasses.replace(own, round=2, is_round_common=True)
