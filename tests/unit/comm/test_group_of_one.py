"""A group of one returns what a larger group would, and refuses impossible exchanges; a Pending ends once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.comm.exchange import Pending
from megatrain.contracts.black_box.operations import Operation
from tests.helpers.single_rank import simulated_group

GATHER, REDUCE = Operation.PARAMS_ALL_GATHER, Operation.GRADS_REDUCE_SCATTER


def test_group_of_one_returns_its_argument() -> None:
    group, x = simulated_group("dp", 1, 0), torch.arange(6.0)

    assert group.all_gather(x, GATHER).wait() is x
    assert group.reduce_scatter(x, REDUCE).wait() is x
    assert group.all_to_all(x, Operation.UPDATES_ALL_TO_ALL, [6], [6]).wait() is x
    assert group.all_reduce(x, Operation.DP_ALL_REDUCE).wait() is x
    assert group.all_reduce(x, Operation.DP_ALL_REDUCE, maximum=True).wait() is x
    assert group.broadcast(x, Operation.CHECKPOINT_EXCHANGE, source=0).wait() is x
    assert group.gather(x, Operation.CHECKPOINT_EXCHANGE) == [x]
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
    assert group.num_calls == 0


def test_given_memory_holds_the_result() -> None:
    group, x = simulated_group("dp", 1, 0), torch.arange(6.0)
    for exchange, operation in ((group.all_gather, GATHER), (group.reduce_scatter, REDUCE)):
        apart, own = torch.zeros(6), x.clone()

        assert exchange(x, operation, out=apart).wait() is apart
        assert torch.equal(apart, x)
        # As in buckets: the rank's slice is the whole tensor.
        assert exchange(own[0:6], operation, out=own).wait() is own
        assert torch.equal(own, x)


def test_rows_that_do_not_divide_are_refused() -> None:
    group = simulated_group("tp", 2, 0)
    with pytest.raises(ValueError, match=r"reduce-scatter over tp: dim 0 of \(3, 2\) must be divisible by 2"):
        group.reduce_scatter(torch.zeros(3, 2), REDUCE)


def test_pending_is_done_with_its_exchange_or_after_waiting() -> None:
    is_over, finished = False, []
    pending = Pending(torch.zeros(1), lambda: finished.append("finished"), lambda: is_over)

    assert not pending.is_done()
    is_over = True
    assert pending.is_done()
    is_over = False
    results: list[Tensor] = [pending.wait(), pending.wait()]
    assert results[0] is results[1] is pending.result
    assert finished == ["finished"]
    assert pending.is_done()
    assert Pending(torch.zeros(1)).is_done()
