"""SGD compared with torch.optim.SGD, whole and in shards, with decoupled weight decay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.example_optimizer import DECAYED, build_rank, draw, whole_state

STEPS = 6


def by_torch(momentum: float, weight_decay: float, *, has_nesterov: bool) -> dict[str, Tensor]:
    weights = {name: one.requires_grad_() for name, one in draw(0).items()}
    optimizer = torch.optim.SGD(list(weights.values()), lr=0.1, momentum=momentum, nesterov=has_nesterov)
    for step in range(STEPS):
        for name, gradient in draw(100 + step).items():
            weights[name].grad = 0.5 * gradient
            if name in DECAYED:
                weights[name].data.mul_(1 - 0.1 * weight_decay)
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


@pytest.mark.slow(kept=["1-0.9-0.1-False", "1-0.5-0.0-True", "3-0.9-0.1-True", "3-0.5-0.0-False"])
@pytest.mark.parametrize("has_nesterov", [True, False])
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.9, 0.1), (0.5, 0.0)])
@pytest.mark.parametrize("dp_size", [1, 3])
def test_steps_are_those_of_torch(dp_size: int, momentum: float, weight_decay: float, has_nesterov: bool) -> None:
    options = {"momentum": momentum, "weight_decay": weight_decay, "has_nesterov": has_nesterov}
    ranks = [build_rank(dp_size, rank, name="sgd", **options) for rank in range(dp_size)]
    for step in range(STEPS):
        for rank in ranks:
            rank.set_gradients(draw(100 + step))
            rank.optimizer.step(0.1, 0.5)

    found = whole_state(ranks)
    for name, truth in by_torch(momentum, weight_decay, has_nesterov=has_nesterov).items():
        torch.testing.assert_close(found[name], truth, rtol=1e-12, atol=1e-12, msg=name)
