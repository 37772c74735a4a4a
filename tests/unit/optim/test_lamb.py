"""LAMB compared with the explicit algorithm for whole parameters, also where parameters are spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.helpers.example_optimizer import CUT, DECAYED, SHAPES, Rank, build_rank, draw, whole_state
from tests.helpers.thread_groups import on_all, thread_meshes

STEPS = 6


def plain_lamb(
    weights: dict[str, Tensor], gradients: list[dict[str, Tensor]], weight_decay: float, lr: float
) -> dict[str, Tensor]:
    """Algorithm 2 of arXiv:1904.00962, with a trust ratio for decayed parameters only."""
    found = {name: weight.clone() for name, weight in weights.items()}
    first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    second = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for number, step in enumerate(gradients, start=1):
        for name, gradient in step.items():
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.95 * second[name] + 0.05 * gradient**2
            update = (first[name] / (1 - 0.9**number)) / ((second[name] / (1 - 0.95**number)).sqrt() + 1e-6)
            ratio = 1.0
            if name in DECAYED:
                update = update + weight_decay * found[name]
                weight_norm, update_norm = found[name].norm().item(), update.norm().item()
                ratio = weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else 1.0
            found[name] = found[name] - lr * ratio * update
    return found


def run(ranks: list[Rank], gradients: list[dict[str, Tensor]], scales: Sequence[float] | None = None) -> None:
    def follow(rank: Rank) -> None:
        for step, scale in zip(gradients, scales or [1.0] * len(gradients), strict=True):
            rank.set_gradients(step)
            rank.optimizer.step(0.05, scale)

    on_all(ranks, follow)


def make_ranks(dp_size: int, tp_size: int = 1, **options: object) -> list[Rank]:
    return [build_rank(mesh=mesh, name="lamb", eps=1e-6, **options) for mesh in thread_meshes(dp_size, tp_size)]


@pytest.mark.slow(kept=["1-150", "2-1", "2-1000000", "3-150"])
@pytest.mark.parametrize("bucket_size", [1, 150, 10**6])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_sharded_parameter_has_the_ratio_of_the_whole(dp_size: int, bucket_size: int) -> None:
    ranks = make_ranks(dp_size, weight_decay=0.1, bucket_size=bucket_size)
    gradients = [draw(100 + step) for step in range(STEPS)]
    run(ranks, gradients)

    found, expected = whole_state(ranks), plain_lamb(draw(0), gradients, 0.1, 0.05)
    for name, truth in expected.items():
        torch.testing.assert_close(found[name], truth, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_tensor_parallel_parameter_has_the_ratio_of_the_whole(dp_size: int) -> None:
    """The norms of divided parameters are summed over tp; a parameter that every tp rank holds, even a matrix, has the
    same ratio on each."""
    ranks = make_ranks(dp_size, tp_size=2, weight_decay=0.1)
    gradients = [draw(100 + step) for step in range(STEPS)]
    run(ranks, gradients)

    found, expected = whole_state(ranks), plain_lamb(draw(0), gradients, 0.1, 0.05)
    assert CUT < DECAYED
    for name, truth in expected.items():
        torch.testing.assert_close(found[name], truth, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("factor", "weight_decay", "scales"),
    [
        # another scale each step: a trust ratio hides a constant one
        pytest.param(1.0, 0.1, (1.0, 0.25, 3.0, 0.5, 2.0, 0.125), id="scaled gradients"),
        pytest.param(1.0, 0.0, (1.0,) * STEPS, id="no weight decay"),
        pytest.param(0.01, 0.0, (1.0,), id="weights with a norm below one"),
    ],
)
def test_trust_ratio_is_that_of_the_algorithm(factor: float, weight_decay: float, scales: tuple[float, ...]) -> None:
    weights = {name: factor * one for name, one in draw(0).items()}
    ranks = make_ranks(1, weights=weights, weight_decay=weight_decay)
    gradients = [draw(100 + step) for step in range(len(scales))]
    run(ranks, gradients, scales)

    scaled = [{name: scale * one for name, one in step.items()} for step, scale in zip(gradients, scales, strict=True)]
    expected = plain_lamb(weights, scaled, weight_decay, 0.05)
    for name, found in whole_state(ranks).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-10, atol=1e-10, msg=name)


def test_biases_and_norms_move_as_with_adam() -> None:
    (lamb,) = make_ranks(1, weight_decay=0.1)
    adam = build_rank(weight_decay=0.1, eps=1e-6)
    for step in range(STEPS):
        for rank in (lamb, adam):
            rank.set_gradients(draw(100 + step))
            rank.optimizer.step(0.05, 1.0)

    found, expected = whole_state([lamb]), whole_state([adam])
    for name in SHAPES:
        is_alike = torch.allclose(found[name], expected[name], rtol=1e-9)
        assert is_alike == (name not in DECAYED), name


def test_weights_of_zero_have_the_ratio_one() -> None:
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    ranks = make_ranks(1, weights=zeros, weight_decay=0.1)
    run(ranks, [draw(5)])

    for name, found in whole_state(ranks).items():
        gradient = draw(5)[name]
        torch.testing.assert_close(found, -0.05 * gradient / (gradient.abs() + 1e-6), rtol=1e-9, atol=0, msg=name)


def test_gradients_of_zero_move_nothing_but_decay() -> None:
    ranks = make_ranks(1, weight_decay=0.0)
    run(ranks, [{name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}])

    assert all(torch.equal(found, draw(0)[name]) for name, found in whole_state(ranks).items())
