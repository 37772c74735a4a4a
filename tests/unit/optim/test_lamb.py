"""LAMB against the algorithm written out for whole parameters, also where parameters are spread over ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatrain.comm.group import Group, Pending
from tests.helpers.hand_made_optimizer import DECAYED, SHAPES, Rank, build_rank, draw, whole_state
from tests.helpers.lone_rank import SilentRecorder, lone_mesh

STEPS = 6


def plain_lamb(
    weights: dict[str, Tensor], gradients: list[dict[str, Tensor]], weight_decay: float, lr: float
) -> dict[str, Tensor]:
    """Algorithm 2 of arXiv:1904.00962, with a trust ratio for decayed parameters only."""
    found = {name: one.clone() for name, one in weights.items()}
    first = {name: torch.zeros_like(one) for name, one in weights.items()}
    second = {name: torch.zeros_like(one) for name, one in weights.items()}
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


class MeetingGroup(Group):
    """A group whose ranks are threads that add up at a barrier."""

    __slots__ = ("_barrier", "_tensors")

    def __init__(self, barrier: threading.Barrier, tensors: list[Tensor | None], rank: int) -> None:
        super().__init__("dp", tuple(range(len(tensors))), rank, SilentRecorder())
        self._barrier = barrier
        self._tensors = tensors

    def all_reduce(self, x: Tensor, operation: object, *, maximum: bool = False) -> Pending:
        self._tensors[self.rank] = x.clone()
        self._barrier.wait(timeout=20)
        total = torch.stack([one for one in self._tensors if one is not None]).sum(0)
        self._barrier.wait(timeout=20)
        return Pending(x.copy_(total))


def run(ranks: list[Rank], gradients: list[dict[str, Tensor]], lr: float = 0.05) -> None:
    def follow(rank: Rank) -> None:
        for step in gradients:
            rank.set_gradients(step)
            rank.optimizer.step(lr, 1.0)

    with ThreadPoolExecutor(len(ranks)) as pool:
        for _ in pool.map(follow, ranks):
            pass


def make_ranks(dp_size: int, **options: object) -> list[Rank]:
    barrier, tensors = threading.Barrier(dp_size), [None] * dp_size
    meshes = [replace(lone_mesh(), dp=MeetingGroup(barrier, tensors, rank)) for rank in range(dp_size)]
    return [build_rank(mesh=mesh, name="lamb", eps=1e-6, **options) for mesh in meshes]


@pytest.mark.parametrize("bucket_size", [1, 150, 10**6])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_parameters_spread_over_shares_have_the_ratio_of_the_whole(dp_size: int, bucket_size: int) -> None:
    ranks = make_ranks(dp_size, weight_decay=0.1, bucket_size=bucket_size)
    gradients = [draw(100 + step) for step in range(STEPS)]
    run(ranks, gradients)

    found, expected = whole_state(ranks), plain_lamb(draw(0), gradients, 0.1, 0.05)
    for name, truth in expected.items():
        torch.testing.assert_close(found[name], truth, rtol=1e-10, atol=1e-10, msg=name)


def test_without_weight_decay_matrices_still_have_a_ratio() -> None:
    ranks = make_ranks(1, weight_decay=0.0)
    gradients = [draw(100 + step) for step in range(STEPS)]
    run(ranks, gradients)

    expected = plain_lamb(draw(0), gradients, 0.0, 0.05)
    assert all(torch.allclose(one, expected[name], rtol=1e-10) for name, one in whole_state(ranks).items())


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


def test_replicas_over_tensor_parallel_are_counted_once() -> None:
    """A parameter that every tp rank holds adds its norm on tp rank 0 only; the others read the sum."""
    rank = build_rank(name="lamb")
    for _, state in rank.optimizer.states:
        assert state.is_counted_over_tp
    (_, state) = rank.optimizer.states[0]
    for tp_rank in range(2):
        tp = replace(lone_mesh()).tp
        tp.name, tp.ranks, tp.rank = "tp", (0, 1), tp_rank
        state.bucket.sum_groups = (tp,)
        assert type(state)(state.bucket).is_counted_over_tp == (tp_rank == 0)
