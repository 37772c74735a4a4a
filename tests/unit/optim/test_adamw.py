"""AdamW compared with torch.optim.AdamW, whole and in shards, and the state that it does not change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.example_optimizer import DECAYED, SHAPES, build_rank, draw, whole_state

STEPS = 20


def by_torch(dtype: torch.dtype, weight_decay: float, eps: float) -> dict[str, Tensor]:
    """Return the weights after torch's own AdamW with two parameter groups."""
    weights = {name: one.to(dtype).requires_grad_() for name, one in draw(0).items()}
    groups = [
        {"params": [weight for name, weight in weights.items() if name in DECAYED], "weight_decay": weight_decay},
        {"params": [weight for name, weight in weights.items() if name not in DECAYED], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=eps)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        for name, gradient in draw(100 + step).items():
            weights[name].grad = gradient.to(dtype)
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("dp_size", "weight_decay", "eps", "dtype"),
    [
        (1, 0.0, 1e-8, torch.float64),
        (1, 0.1, 0.5, torch.float64),
        (2, 0.1, 1e-8, torch.float64),
        (3, 0.1, 0.5, torch.float64),
        (1, 0.1, 1e-8, torch.float32),
    ],
)
def test_twenty_steps_are_those_of_torch(dp_size: int, weight_decay: float, eps: float, dtype: torch.dtype) -> None:
    ranks = [build_rank(dp_size, rank, weight_decay=weight_decay, eps=eps, dtype=dtype) for rank in range(dp_size)]
    for step in range(STEPS):
        for rank in ranks:
            rank.set_gradients(draw(100 + step))
            rank.optimizer.step(0.1 / (step + 1), 1.0)

    found, expected = whole_state(ranks), by_torch(dtype, weight_decay, eps)
    rtol, atol = (1e-12, 1e-12) if dtype == torch.float64 else (1e-5, 1e-6)
    for name, truth in expected.items():
        torch.testing.assert_close(found[name], truth, rtol=rtol, atol=atol, msg=name)


def test_decay_alone_shrinks_matrices_and_nothing_else() -> None:
    rank = build_rank(weight_decay=0.5)
    rank.set_gradients({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    rank.optimizer.step(0.1, 1.0)

    for name, found in whole_state([rank]).items():
        factor = 1 - 0.1 * 0.5 if name in DECAYED else 1.0
        torch.testing.assert_close(found, draw(0)[name] * factor, rtol=1e-15, atol=0, msg=name)


def test_gradient_scale_multiplies_the_gradients() -> None:
    scaled, plain = build_rank(eps=1.0), build_rank(eps=1.0)
    gradients = draw(5)
    scaled.set_gradients(gradients)
    scaled.optimizer.step(0.1, 0.25)
    plain.set_gradients({name: 0.25 * gradient for name, gradient in gradients.items()})
    plain.optimizer.step(0.1, 1.0)

    for kind in ("master", "exp_avg", "exp_avg_sq"):
        found, expected = whole_state([scaled], kind), whole_state([plain], kind)
        assert all(torch.equal(found[name], expected[name]) for name in SHAPES)


def test_updates_are_counted_from_one() -> None:
    """The first step's bias correction makes it lr * sign(gradient), for any betas."""
    rank = build_rank(weight_decay=0.0, eps=1e-30)
    assert rank.optimizer.num_updates == 0
    rank.set_gradients(draw(5))
    rank.optimizer.step(0.1, 1.0)

    assert rank.optimizer.num_updates == 1
    for name, found in whole_state([rank]).items():
        torch.testing.assert_close(found, draw(0)[name] - 0.1 * draw(5)[name].sign(), rtol=1e-9, atol=1e-9)
