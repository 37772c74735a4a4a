"""The moving average of the weights follows every update rule, in shards too, and influences none."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.example_optimizer import SHAPES, build_rank, draw, whole_state

STEPS, DECAY = 4, 0.75


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("name", "dp_size"), [("adamw", 2), ("lamb", 1), ("muon", 1), ("sgd", 3)])
def test_the_average_is_that_of_the_weights_after_each_update(name: str, dp_size: int, dtype: torch.dtype) -> None:
    ranks = [build_rank(dp_size, rank, name=name, ema_decay=DECAY, dtype=dtype) for rank in range(dp_size)]
    plain = [build_rank(dp_size, rank, name=name, dtype=dtype) for rank in range(dp_size)]
    for rank in ranks:
        rank.optimizer.begin_averages()
    expected = whole_state(ranks)
    assert all(torch.equal(one, expected[parameter]) for parameter, one in whole_state(ranks, "ema").items())
    for step in range(STEPS):
        for rank in (*ranks, *plain):
            rank.set_gradients(draw(100 + step))
            rank.optimizer.step(0.05, 1.0)
        weights = whole_state(ranks)
        expected = {key: DECAY * one + (1 - DECAY) * weights[key] for key, one in expected.items()}

    bound = 1e-12 if dtype == torch.float64 else 1e-6
    averages, weights, without = whole_state(ranks, "ema"), whole_state(ranks), whole_state(plain)
    for parameter in SHAPES:
        assert averages[parameter].dtype == weights[parameter].dtype
        torch.testing.assert_close(averages[parameter], expected[parameter], rtol=bound, atol=bound, msg=parameter)
        assert torch.equal(weights[parameter], without[parameter])
        assert not torch.equal(averages[parameter], weights[parameter])
