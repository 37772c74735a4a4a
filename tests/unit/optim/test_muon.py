"""Muon compared with the explicit algorithm by singular values, and with torch's own, also spread over ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatrain.ops.orthogonalize import COEFFICIENTS, NUM_STEPS
from megatrain.parallel.decoder import decoder_table
from megatrain.parallel.logical_matrices import matrices_of
from megatrain.parallel.placement import row_of
from tests.helpers.example_optimizer import HIDDEN, SHAPES, Rank, box_slices, build_rank, draw, whole_state
from tests.helpers.single_rank import (
    gradients_by_name,
    make_config,
    parameters_by_name,
    random_tokens,
    run_gradients,
    single_rank_model,
)
from tests.helpers.thread_groups import on_all, thread_meshes

STEPS, LR = 3, 0.05


def plain_muon(gradients: list[dict[str, Tensor]], weight_decay: float, *, has_nesterov: bool) -> dict[str, Tensor]:
    """Return the hidden weights after some steps. Singular values replace the iteration's products."""
    found = {name: draw(0)[name] for name in HIDDEN}
    momentum = {name: torch.zeros_like(one) for name, one in found.items()}
    for step in gradients:
        for name, weight in found.items():
            momentum[name] = 0.95 * momentum[name] + 0.05 * step[name]
            direction = 0.05 * step[name] + 0.95 * momentum[name] if has_nesterov else momentum[name]
            flat = direction.view(-1, direction.shape[-1])
            left, values, right = torch.linalg.svd(flat / flat.norm(), full_matrices=False)
            for _ in range(NUM_STEPS):
                values = sum(factor * values**power for factor, power in zip(COEFFICIENTS, (1, 3, 5), strict=True))
            scale = 0.2 * math.sqrt(max(flat.shape))
            update = (left @ torch.diag(values) @ right).view(weight.shape)
            found[name] = (1 - LR * weight_decay) * weight - LR * scale * update
    return found


def run(ranks: list[Rank], gradients: list[dict[str, Tensor]], scale: float = 1.0) -> None:
    def follow(rank: Rank) -> None:
        for step in gradients:
            rank.set_gradients(step)
            rank.optimizer.step(LR, scale)

    on_all(ranks, follow)


@pytest.mark.slow(kept=["1-1-1000000", "3-1-1000000", "1-2-1", "2-2-1000000"])
@pytest.mark.parametrize("bucket_size", [1, 10**6])
@pytest.mark.parametrize(("dp_size", "tp_size"), [(1, 1), (3, 1), (1, 2), (2, 2)])
def test_matrices_spread_over_ranks_move_as_whole_ones(dp_size: int, tp_size: int, bucket_size: int) -> None:
    """A weight that tp divides, and one that each tp rank holds."""
    options = {"name": "muon", "weight_decay": 0.1, "bucket_size": bucket_size}
    ranks = [build_rank(mesh=mesh, **options) for mesh in thread_meshes(dp_size, tp_size)]
    adam = build_rank(weight_decay=0.1)
    gradients = [draw(100 + step) for step in range(STEPS)]
    run(ranks, gradients)
    run([adam], gradients)

    found, others = whole_state(ranks), whole_state([adam])
    for name, truth in plain_muon(gradients, 0.1, has_nesterov=True).items():
        torch.testing.assert_close(found[name], truth, rtol=1e-10, atol=1e-10, msg=name)
    for name in SHAPES.keys() - HIDDEN:
        torch.testing.assert_close(found[name], others[name], rtol=1e-12, atol=1e-12, msg=name)


def test_without_nesterov_the_momentum_itself_is_the_direction() -> None:
    ranks = [build_rank(name="muon", weight_decay=0.0, has_nesterov=False)]
    gradients = [draw(100 + step) for step in range(STEPS)]
    run(ranks, gradients, 0.25)

    found = whole_state(ranks)
    scaled = [{name: 0.25 * one for name, one in step.items()} for step in gradients]
    for name, truth in plain_muon(scaled, 0.0, has_nesterov=False).items():
        torch.testing.assert_close(found[name], truth, rtol=1e-10, atol=1e-10, msg=name)


def test_a_step_of_the_model_is_that_of_torch() -> None:
    """In bf16, as in torch: q, k and v separately, gate and up separately; all other parameters as in torch's AdamW."""
    config = make_config(
        model={"mlp": "swiglu", "num_kv_heads": 2},
        train={"precision": "fp32", "steps": 2},
        optimizer={"name": "muon", "muon_precision": "bf16", "weight_decay": 0.1, "lr": 1e-2, "grad_clip": 0.0},
    )
    rank_model = single_rank_model(config)
    weights = {name: one.clone().requires_grad_() for name, one in parameters_by_name(rank_model).items()}
    parts = {name: logical_parts(name, weight.detach()) for name, weight in weights.items() if is_hidden(name)}
    decayed = [name for name in weights if not is_hidden(name) and not name.endswith(("bias", "norm.weight"))]
    others = [name for name in weights if not is_hidden(name) and name not in decayed]
    muon = torch.optim.Muon(
        [part for of_weight in parts.values() for part in of_weight],
        lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    groups = [{"params": [weights[name] for name in decayed], "weight_decay": 0.1},
              {"params": [weights[name] for name in others], "weight_decay": 0.0}]  # fmt: skip
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(2):
        run_gradients(rank_model, random_tokens(config, step))
        for name, gradient in gradients_by_name(rank_model).items():
            if is_hidden(name):
                for part, own in zip(parts[name], logical_parts(name, gradient), strict=True):
                    part.grad = own
            else:
                weights[name].grad = gradient
        muon.step()
        adam.step()
        rank_model.optimizer.step(1e-2, 1.0)

    found = parameters_by_name(rank_model)
    for name in decayed + others:
        torch.testing.assert_close(found[name], weights[name].detach(), rtol=1e-5, atol=1e-6, msg=name)
    for name, of_weight in parts.items():
        for part, truth in zip(logical_parts(name, found[name]), of_weight, strict=True):
            torch.testing.assert_close(part, truth, rtol=1e-5, atol=1e-4, msg=name)


def is_hidden(name: str) -> bool:
    return row_of(name, decoder_table()).is_hidden_weight


def logical_parts(name: str, whole: Tensor) -> list[Tensor]:
    """Return copies of the logical matrices of a weight."""
    matrices = matrices_of(name, tuple(whole.shape), row_of(name, decoder_table()).fused)
    return [
        whole[box_slices(matrix.box.offsets, matrix.box.sizes)].reshape(matrix.num_rows, matrix.num_columns).clone()
        for matrix in matrices
    ]
