"""The pipeline runtime with one stage compared with plain autograd: loss, gradients, evaluation, and the final
state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatrain.contracts.labels import IGNORED_LABEL
from megatrain.model import TokenContext, Transformer
from megatrain.parallel.pipeline import PipelineInput
from megatrain.schedule import ChunkPlacement, build_schedule, forward_only
from tests.helpers.single_rank import (
    gradients_by_name,
    make_config,
    microbatches,
    parameters_by_name,
    random_tokens,
    run_gradients,
    single_rank_model,
)

STYLES: dict[str, dict[str, Any]] = {
    "gpt": {"dropout": 0.1},
    "llama": {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "has_bias": False, "has_tied_head": False},
}


def plain_gradients(style: str, tokens: Tensor, weights: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """One pass over the whole batch with torch alone."""
    config = make_config(model=STYLES[style])
    model = Transformer(config.model, dropout_seed=config.train.seed).double()
    model.load_state_dict(weights, strict=False)
    context = TokenContext(torch.arange(tokens.shape[1]), tokens.shape[0] - 1)
    loss = model(tokens[:-1], context, tokens[1:]) / tokens[1:].numel()
    loss.backward()
    return loss.item(), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.slow(kept=["llama-1f1b-4-2", "llama-gpipe-2-1", "llama-gpipe-1-2", "gpt-gpipe-2-2"])
@pytest.mark.parametrize("zero_stage", [1, 2])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("style", STYLES)
def test_microbatches_give_loss_and_gradients_of_the_batch(
    style: str, schedule: str, micro_batch_size: int, zero_stage: int
) -> None:
    config = make_config(
        model=STYLES[style],
        parallel={"schedule": schedule, "zero_stage": zero_stage},
        batch={"micro_batch_size": micro_batch_size, "global_batch_size": 4},
    )
    rank_model = single_rank_model(config)
    tokens = random_tokens(config, seed=1)
    loss = run_gradients(rank_model, tokens)
    expected_loss, expected = plain_gradients(style, tokens, parameters_by_name(rank_model))

    found = gradients_by_name(rank_model)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert found.keys() == expected.keys()
    for name, truth in expected.items():
        assert (found[name] - truth).norm().item() <= 1e-11 * truth.norm().item(), name


def test_second_pass_starts_from_zero_gradients() -> None:
    config = make_config()
    rank_model = single_rank_model(config)
    run_gradients(rank_model, random_tokens(config, seed=1))
    run_gradients(rank_model, random_tokens(config, seed=2))
    fresh = single_rank_model(config)
    run_gradients(fresh, random_tokens(config, seed=2))

    first, second = gradients_by_name(rank_model), gradients_by_name(fresh)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_loss_is_the_sum_over_counted_labels_at_any_scale() -> None:
    config = make_config()
    tokens = random_tokens(config, seed=1)
    sums = []
    for scale in (1.0, 1e-3):
        rank_model = single_rank_model(config)
        inputs = microbatches(rank_model, tokens)
        inputs = [PipelineInput(one.tokens_SB, one.labels_SB.clone(), one.context) for one in inputs]
        for one in inputs:
            one.labels_SB[2:5] = IGNORED_LABEL
        factor = torch.tensor(scale, dtype=torch.float64)
        for chunk in rank_model.data_parallel:
            chunk.start_step()
        losses = rank_model.pipeline.train(build_schedule("1f1b", 1, 1, 2), inputs, lambda factor=factor: factor)
        loss = losses.total
        assert loss.dtype == torch.float64
        assert not loss.requires_grad
        sums.append(loss.item())

    assert sums[0] == sums[1]
    assert 3 < sums[0] / (5 * 4) < 6  # 5 counted positions of 8 in 4 samples, close to log(61) each


def test_evaluation_gives_the_loss_and_touches_no_gradient() -> None:
    config = make_config(model={"dropout": 0.5})
    rank_model = single_rank_model(config)
    tokens = random_tokens(config, seed=1)
    run_gradients(rank_model, tokens)
    before = gradients_by_name(rank_model)
    rank_model.set_training(False)
    losses = [
        rank_model.pipeline.evaluate(forward_only(ChunkPlacement(1, 1), 2), microbatches(rank_model, tokens)).item()
        for _ in range(2)
    ]

    plain = single_rank_model(make_config(model={"dropout": 0.0}))
    expected = plain.pipeline.evaluate(forward_only(ChunkPlacement(1, 1), 2), microbatches(plain, tokens)).item()
    after = gradients_by_name(rank_model)
    assert losses[0] == losses[1] == pytest.approx(expected, rel=1e-12)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_graphs_are_freed_when_the_pass_ends() -> None:
    """The saved tensors of a forward are freed with its backward: no more graphs are ever alive than the schedule has
    in flight."""
    config = make_config(batch={"micro_batch_size": 1, "global_batch_size": 6})
    rank_model = single_rank_model(config)
    kept: list[StorageWeakRef] = []
    most = 0

    def note(module: object, arguments: object, output: Tensor) -> None:
        nonlocal most
        kept.append(StorageWeakRef(output.untyped_storage()))
        most = max(most, sum(not one.expired() for one in kept))

    (chunk,) = rank_model.pipeline.chunks
    chunk.module.get_submodule("blocks.1.mlp_branch.mlp.activation").register_forward_hook(note)
    run_gradients(rank_model, random_tokens(config, seed=1))

    assert len(kept) == 6
    assert most == 1
    assert all(one.expired() for one in kept)


def test_loss_scale_is_asked_for_no_earlier_than_the_first_loss() -> None:
    config = make_config()
    rank_model = single_rank_model(config)
    (chunk,) = rank_model.pipeline.chunks
    order: list[str] = []
    chunk.module.register_forward_hook(lambda *_: order.append("forward"))

    def scale() -> Tensor:
        order.append("scale")
        return torch.tensor(1.0, dtype=torch.float64)

    for one in rank_model.data_parallel:
        one.start_step()
    inputs = microbatches(rank_model, random_tokens(config, seed=1))
    rank_model.pipeline.train(build_schedule("1f1b", 1, 1, 2), inputs, scale)

    assert order[:2] == ["forward", "scale"]
