"""All implementations of the norms have one contract: megatrain's own, NVIDIA apex, and its stand-in without a GPU.

They are compared with plain torch by the relative rule, in the forms in which a block uses a norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatrain.config.kernels import KernelsConfig
from megatrain.model.norm import LayerNorm, Normalize, RmsNorm, use_norms
from megatrain.ops.normalization import ResidualStream, layer_norm, rms_norm
from megatrain.ops.optional_backends import find_apex
from tests.helpers.backend_packages import APEX, write_packages
from tests.helpers.kernels import UNDER_TEST, draw
from tests.helpers.plain_norms import EPS, eager_rms, plain_add_layer_norm, plain_add_rms, plain_layer_norm
from tests.helpers.relative_error import assert_no_worse_than_eager
from tests.helpers.require import require
from tests.helpers.single_rank import gradients_by_name, make_config, random_tokens, run_gradients, single_rank_model
from tests.helpers.single_rank_buckets import bucket_gradients, put_in_buckets

HALF_AND_SINGLE = [torch.bfloat16, torch.float16, torch.float32]


@dataclass(frozen=True, slots=True)
class Norms:
    """One implementation, and the device that it is tested on."""

    config: KernelsConfig
    device: torch.device

    def build(self, kind: type[nn.Module], hidden_size: int = 8, device: torch.device | None = None) -> Any:
        with device or self.device:
            norm = kind(hidden_size, EPS)
        use_norms(norm, self.config, self.device)
        return norm

    def function(self, kind: type[nn.Module]) -> Normalize:
        return self.build(kind).normalize

    def draw(self, *shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        return draw(*shape, dtype=dtype, seed=seed).to(self.device)


@pytest.fixture(params=["megatrain", "stand-in", "apex"])
def norms(request: pytest.FixtureRequest) -> Norms:
    if request.param == "megatrain":
        return Norms(KernelsConfig(), UNDER_TEST.device)
    if request.param == "stand-in":
        write_packages(request.getfixturevalue("package_root"), APEX)
        return Norms(KernelsConfig(norm="apex"), torch.device("cpu"))
    require("gpu", torch.cuda.is_available(), "apex runs on CUDA, and torch.cuda.is_available() is false here")
    require("apex", not find_apex().problem, find_apex().problem)
    return Norms(KernelsConfig(norm="apex"), torch.device("cuda"))


def inputs(norms: Norms, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return x, the residual, weight and bias, and a gradient for each of two results."""
    x, added = (norms.draw(*shape, dtype=dtype, seed=seed) for seed in (0, 1))
    weight, bias = norms.draw(shape[-1], dtype=dtype, seed=2) + 1, norms.draw(shape[-1], dtype=dtype, seed=3)
    return [x, added, weight, bias], norms.draw(2, *shape, dtype=dtype, seed=4)


SHAPES = [(64, 4, 128), (33, 120), (16, 1, 4096)]
QUICK = list(zip(SHAPES, HALF_AND_SINGLE, strict=True))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in product(SHAPES, HALF_AND_SINGLE)],
)
def test_results_and_gradients_are_as_good_as_plain_torchs(
    norms: Norms, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    (x, added, weight, bias), grads = inputs(norms, shape, dtype)
    rms, layer = norms.function(RmsNorm), norms.function(LayerNorm)

    assert_no_worse_than_eager(lambda x, w: rms(x, w, EPS)[0], eager_rms, [x, weight], grads[0])
    assert_no_worse_than_eager(lambda x, w, b: layer(x, w, b, EPS)[0], plain_layer_norm, [x, weight, bias], grads[0])
    assert_no_worse_than_eager(lambda x, a, w: torch.stack(rms(x, w, EPS, a)), plain_add_rms, [x, added, weight], grads)
    assert_no_worse_than_eager(
        lambda x, a, w, b: torch.stack(layer(x, w, b, EPS, a)), plain_add_layer_norm, [x, added, weight, bias], grads
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sum_is_rounded_before_it_is_normed(norms: Norms, dtype: torch.dtype) -> None:
    (x, added, weight, bias), _ = inputs(norms, (9, 2, 264), dtype)
    for kind, parameters in ((RmsNorm, (weight,)), (LayerNorm, (weight, bias))):
        normalize = norms.function(kind)
        normed, total = normalize(x, *parameters, EPS, added)
        again, same = normalize(total, *parameters, EPS)

        # Bit by bit: recomputation normalizes the sum that was kept.
        assert torch.equal(total, x + added)
        assert torch.equal(same, total)
        assert torch.equal(again, normed)


def test_an_input_that_is_not_contiguous(norms: Norms) -> None:
    (x, added, weight, bias), _ = inputs(norms, (6, 4, 16), torch.float32)
    turned = [one.transpose(0, 1) for one in (x, added)]
    for kind, parameters in ((RmsNorm, (weight,)), (LayerNorm, (weight, bias))):
        for with_added in (False, True):
            found = norms.function(kind)(turned[0], *parameters, EPS, turned[1] if with_added else None)
            expected = norms.function(kind)(x, *parameters, EPS, added if with_added else None)
            assert [one.is_contiguous() for one in found] == [True, True]
            assert all(torch.equal(a, b.transpose(0, 1)) for a, b in zip(found, expected, strict=True))


def test_unused_result_has_no_gradient(norms: Norms) -> None:
    (x, added, weight, _), grads = inputs(norms, (4, 2, 16), torch.float32)
    leaves = [one.requires_grad_() for one in (x, added, weight)]
    norms.function(RmsNorm)(x, weight, EPS, added)[1].backward(grads[1])

    assert torch.equal(leaves[0].grad, grads[1])
    assert torch.equal(leaves[1].grad, grads[1])
    assert leaves[2].grad is None or not leaves[2].grad.any()


def test_evaluation_gives_the_same_bits_and_no_graph(norms: Norms) -> None:
    (x, added, weight, bias), _ = inputs(norms, (8, 2, 64), torch.bfloat16)
    weight.requires_grad_()
    for kind, parameters in ((RmsNorm, (weight,)), (LayerNorm, (weight, bias))):
        normalize = norms.function(kind)
        trained = normalize(x, *parameters, EPS, added)
        with torch.no_grad():
            evaluated = normalize(x, *parameters, EPS, added)

        assert all(torch.equal(a, b) for a, b in zip(trained, evaluated, strict=True))
        assert not any(one.requires_grad for one in evaluated)


@pytest.mark.parametrize("kind", [RmsNorm, LayerNorm])
def test_gradients_of_the_parameters_add_up_in_the_bucket(norms: Norms, kind: type[nn.Module]) -> None:
    norm = norms.build(kind, 128, torch.device("meta"))
    chunk = put_in_buckets(norm, torch.bfloat16, norms.device)
    plain = eager_rms if kind is RmsNorm else plain_layer_norm
    expected = [torch.zeros(128, dtype=torch.float64, device=norms.device) for _ in norm.parameters()]
    chunk.start_step()
    for number in range(2):  # The first backward finds fresh memory, the second adds to it.
        x, grad = (norms.draw(64, 2, 128, dtype=torch.bfloat16, seed=seed + number) for seed in (0, 10))
        norm(ResidualStream(x))[0].backward(grad)
        wide = [one.detach().double().requires_grad_() for one in norm.parameters()]
        plain(x.double(), *wide).backward(grad.double())
        expected = [total + one.grad for total, one in zip(expected, wide, strict=True)]

    found = bucket_gradients(chunk)
    for (name, parameter), truth in zip(norm.named_parameters(), expected, strict=True):
        assert parameter.grad is None
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name].double(), truth, rtol=0, atol=2**-7 * truth.abs().max().item())


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_model_trains_with_apex(package_root: Path, norm: str) -> None:
    write_packages(package_root, APEX)
    results = []
    for name, parallel in (
        ("megatrain", {}),
        ("apex", {}),
        ("apex", {"recompute": "selective"}),
        ("apex", {"recompute": "full"}),
        ("apex", {"offload_layers": 1}),
    ):
        config = make_config(
            model={"norm": norm}, train={"precision": "fp32"}, kernels={"norm": name}, parallel=parallel
        )
        rank_model = single_rank_model(config)
        loss = run_gradients(rank_model, random_tokens(config, seed=0))
        results.append((loss, gradients_by_name(rank_model)))

    (own_loss, own), (loss, found), *recomputed = results
    assert loss == pytest.approx(own_loss, rel=1e-6)
    assert found.keys() == own.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, own[name], rtol=1e-4, atol=1e-6, msg=name)
    for again_loss, again in recomputed:
        assert again_loss == loss
        assert all(torch.equal(again[name], gradient) for name, gradient in found.items())


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_every_norm_of_a_model_is_replaced_and_nothing_else(package_root: Path, kind: str) -> None:
    write_packages(package_root, APEX)
    config = make_config(model={"norm": kind}, kernels={"norm": "apex"}, train={"precision": "fp32"})
    plain = single_rank_model(make_config(model={"norm": kind}, train={"precision": "fp32"}))
    rank_model = single_rank_model(config)
    found = [
        module for module in rank_model.pipeline.chunks[0].module.modules() if isinstance(module, (LayerNorm, RmsNorm))
    ]

    assert len(found) == 2 * config.model.num_layers + 1
    assert not {module.normalize for module in found} & {layer_norm, rms_norm}
    names = [[name for name, _ in one.pipeline.chunks[0].module.named_parameters()] for one in (plain, rank_model)]
    assert names[0] == names[1]
