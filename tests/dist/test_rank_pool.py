"""The shared pool of ranks: results come back, errors and stuck ranks are named, and the pool recovers."""

from __future__ import annotations

import os
import re
import threading

import pytest
import torch
import torch.distributed as distributed

from tests.helpers.rank_pool import RankDeadlineError, RankError, RankPool
from tests.helpers.rank_protocol import RankContext


def join(context: RankContext) -> None:
    distributed.init_process_group(
        "gloo", init_method=context.init_method, rank=context.rank, world_size=context.world_size
    )


def sum_over_ranks(context: RankContext, value: torch.Tensor) -> torch.Tensor:
    join(context)
    total = value * (context.rank + 1)
    distributed.all_reduce(total)
    return total


def fail_on_one_rank(context: RankContext, failing_rank: int) -> None:
    join(context)
    if context.rank == failing_rank:
        raise ValueError(f"no luck on rank {context.rank}")
    distributed.barrier()


def block_on_one_rank(context: RankContext, stuck_rank: int) -> int:
    if context.rank == stuck_rank:
        threading.Event().wait()
    return context.rank


def die_on_one_rank(context: RankContext, dying_rank: int) -> int:
    if context.rank == dying_rank:
        os._exit(7)
    return context.rank


def leave_state_behind(context: RankContext) -> None:
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def observe_state(context: RankContext) -> tuple[bool, torch.dtype, bool, int, float]:
    return (
        "LEFT_BEHIND" in os.environ,
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.rand(1).item(),
    )


@pytest.mark.parametrize("world_size", [1, 8])
def test_ranks_reduce_and_return_tensors(rank_pool: RankPool, world_size: int) -> None:
    results = rank_pool.run(sum_over_ranks, world_size, torch.tensor([1.0, 2.0]))

    expected = torch.tensor([1.0, 2.0]) * sum(range(1, world_size + 1))
    assert len(results) == world_size
    assert all(torch.equal(result, expected) for result in results)


def test_processes_are_reused_by_the_next_run(rank_pool: RankPool) -> None:
    rank_pool.run(block_on_one_rank, 2, -1)
    before = rank_pool.process_ids
    rank_pool.run(block_on_one_rank, 2, -1)

    assert rank_pool.process_ids == before


def test_error_names_the_first_failed_rank_with_its_traceback(rank_pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"fail_on_one_rank on 4 ranks: rank 2 failed first: Traceback") as caught:
        rank_pool.run(fail_on_one_rank, 4, 2)

    assert not isinstance(caught.value, RankDeadlineError)
    assert "ValueError: no luck on rank 2" in caught.value.failures[0].description
    # The other ranks were inside a barrier and lost their peer.
    assert sorted(failure.rank for failure in caught.value.failures) == [0, 1, 2, 3]
    assert rank_pool.run(block_on_one_rank, 4, -1) == [0, 1, 2, 3]


def test_stuck_rank_is_named_and_the_pool_recovers(rank_pool: RankPool) -> None:
    with pytest.raises(RankDeadlineError, match=r"rank 1 failed first: did not return within 0\.2 s") as caught:
        rank_pool.run(block_on_one_rank, 2, 1, timeout_s=0.2)

    assert [failure.rank for failure in caught.value.failures] == [1]
    assert "in block_on_one_rank" in caught.value.failures[0].description
    assert rank_pool.run(block_on_one_rank, 2, -1) == [0, 1]


def test_dead_process_is_named_and_the_pool_recovers(rank_pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 failed first: its process ended with exit code 7"):
        rank_pool.run(die_on_one_rank, 2, 0)

    assert rank_pool.run(block_on_one_rank, 2, -1) == [0, 1]


def test_a_run_leaves_nothing_to_the_next(rank_pool: RankPool) -> None:
    first = rank_pool.run(observe_state, 2)
    rank_pool.run(leave_state_behind, 2)

    assert rank_pool.run(observe_state, 2) == first
    assert first[0][:4] == (False, torch.float32, True, 1)


def test_close_ends_every_process() -> None:
    with RankPool(size=2) as pool:
        pool.run(block_on_one_rank, 2, -1)
        process_ids = pool.process_ids

    for process_id in process_ids:
        assert process_id is not None
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


def test_function_that_ranks_cannot_import_is_refused(rank_pool: RankPool) -> None:
    with pytest.raises(TypeError, match=re.escape("must be a module-level function")):
        rank_pool.run(lambda context: context.rank, 2)


def test_world_larger_than_the_pool_is_refused(rank_pool: RankPool) -> None:
    with pytest.raises(ValueError, match=r"world_size=9 must be between 1 and the pool's 8"):
        rank_pool.run(observe_state, 9)
