"""All implementations of FP8 products have one contract: megatrain's own, Transformer Engine, and its stand-in.

They are compared with the same product in fp64, within the error of the bits of two factors; tensorwise with current
scaling.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatrain.config.fp8 import Fp8Config
from megatrain.config.model import ModelConfig
from megatrain.model.fp8 import use_fp8
from megatrain.model.linear import Product, Projection
from megatrain.model.transformer import Transformer
from megatrain.ops.linear import linear
from megatrain.ops.optional_backends import find_transformer_engine
from megatrain.ops.transformer_engine_linear import TransformerEngineLinear
from tests.helpers.backend_packages import TRANSFORMER_ENGINE, write_packages
from tests.helpers.fp8_error import GRADIENT_ERROR, INPUT_ERROR, relative
from tests.helpers.kernels import UNDER_TEST, draw
from tests.helpers.relative_error import forward_and_backward
from tests.helpers.require import require
from tests.helpers.single_rank import gradients_by_name, make_config, random_tokens, run_gradients, single_rank_model
from tests.helpers.single_rank_buckets import bucket_gradients, put_in_buckets

SMALL: dict[str, Any] = {"vocab_size": 61, "seq_len": 16, "hidden_size": 64, "num_layers": 2, "num_heads": 4}


class Wide(Projection):
    """Outputs in three dims of which one is divided by tensor parallelism, with a bias: as in attention's
    projection."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 3, 16, 96))
        self.bias = nn.Parameter(torch.empty(2, 3, 16))

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.multiply(x_TI, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class BackendCase:
    """One implementation, and the device that it is tested on."""

    config: Fp8Config
    device: torch.device

    def product(self) -> Product:
        """Return the product as a projection of a model computes it."""
        with torch.device("meta"):
            model = Transformer(ModelConfig(**SMALL))
        assert use_fp8(model, self.config, self.device) is None
        return model.blocks["0"].attention_branch.attention.qkv.multiply

    def draw(self, *shape: int, seed: int = 0) -> Tensor:
        return draw(*shape, dtype=torch.bfloat16, seed=seed).to(self.device)


@pytest.fixture(params=["megatrain", "stand-in", "transformer_engine"])
def backend(request: pytest.FixtureRequest) -> BackendCase:
    if request.param == "megatrain":
        return BackendCase(Fp8Config(recipe="tensorwise"), UNDER_TEST.device)
    config = Fp8Config(recipe="tensorwise", backend="transformer_engine")
    if request.param == "stand-in":
        write_packages(request.getfixturevalue("package_root"), TRANSFORMER_ENGINE)
        return BackendCase(config, torch.device("cpu"))
    require("gpu", torch.cuda.is_available(), "Transformer Engine runs on CUDA, and torch sees no such device here")
    found = find_transformer_engine()
    require("transformer_engine", not found.problem, found.problem)
    return BackendCase(config, torch.device("cuda"))


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_off_by_what_their_bits_allow(backend: BackendCase, has_bias: bool) -> None:
    shapes = [(64, 4, 96), (3, 32, 96), (3, 32)][: 2 + has_bias]
    inputs = [backend.draw(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    grad = backend.draw(64, 4, 96, seed=7)
    truth = forward_and_backward(linear, [one.double() for one in inputs], grad.double())
    out, grad_x, grad_weight, *grad_bias = forward_and_backward(backend.product(), inputs, grad)

    assert out.shape == (64, 4, 96)
    assert out.dtype == grad_x.dtype == grad_weight.dtype == torch.bfloat16
    assert grad_weight.shape == (3, 32, 96)
    assert relative(out, truth[0]) < 1.2 * (2 * INPUT_ERROR**2) ** 0.5
    assert relative(grad_x, truth[1]) < 1.2 * (INPUT_ERROR**2 + GRADIENT_ERROR**2) ** 0.5
    assert relative(grad_weight, truth[2]) < 1.2 * (INPUT_ERROR**2 + GRADIENT_ERROR**2) ** 0.5
    for bias in grad_bias:  # A backend may sum values that were rounded to 8 bits.
        assert bias.shape == (3, 32)
        assert relative(bias, truth[3]) < 1.2 * GRADIENT_ERROR


def test_products_are_in_eight_bits(backend: BackendCase) -> None:
    inputs = [backend.draw(64, 96), backend.draw(32, 96, seed=1)]
    truth = linear(*(one.double() for one in inputs))

    assert relative(backend.product()(*inputs), truth) > 0.5 * (2 * INPUT_ERROR**2) ** 0.5


def test_an_input_that_is_not_contiguous(backend: BackendCase) -> None:
    x, weight, product = backend.draw(32, 2, 96), backend.draw(32, 96, seed=1), backend.product()

    assert torch.equal(product(x.transpose(0, 1), weight), product(x, weight).transpose(0, 1))


def test_products_share_no_state(backend: BackendCase) -> None:
    x, weight, grad = backend.draw(32, 96), backend.draw(32, 96, seed=1), backend.draw(32, 32, seed=2)
    product = backend.product()
    first = forward_and_backward(product, [x, weight], grad)
    forward_and_backward(product, [1e4 * x, 1e-3 * weight], 1e3 * grad)

    again = forward_and_backward(product, [x, weight], grad)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_evaluation_gives_the_same_bits_and_no_graph(backend: BackendCase) -> None:
    x, weight, product = backend.draw(32, 96), nn.Parameter(backend.draw(32, 96, seed=1)), backend.product()
    with torch.no_grad():
        first = product(x, weight)
    trained = product(x, weight)
    with torch.no_grad():
        evaluated = product(x, weight)

    assert trained.requires_grad
    assert not evaluated.requires_grad
    assert torch.equal(evaluated, trained)
    assert torch.equal(first, trained)


def test_gradients_of_the_weight_add_up_in_the_bucket(backend: BackendCase) -> None:
    with torch.device("meta"):
        module = Wide()
    module.multiply = backend.product()
    chunk = put_in_buckets(module, torch.bfloat16, backend.device)
    expected = {name: torch.zeros(one.shape, dtype=torch.float64) for name, one in module.named_parameters()}
    chunk.start_step()
    for number in range(2):  # The first backward finds fresh memory, the second adds to it.
        x, grad = backend.draw(64, 2, 96, seed=number), backend.draw(64, 2, 96, seed=10 + number)
        module(x).backward(grad)
        wide = {name: one.detach().double().requires_grad_() for name, one in module.named_parameters()}
        linear(x.double(), wide["weight"], wide["bias"]).backward(grad.double())
        expected = {name: total + wide[name].grad.cpu() for name, total in expected.items()}

    found = bucket_gradients(chunk)
    for name, parameter in module.named_parameters():
        assert parameter.grad is None
        assert found[name].dtype == torch.float32
        assert relative(found[name].cpu(), expected[name]) < 1.2 * (INPUT_ERROR**2 + GRADIENT_ERROR**2) ** 0.5


def test_two_micro_batches_in_flight_keep_apart(backend: BackendCase) -> None:
    weight, product = nn.Parameter(backend.draw(32, 96, seed=1)), backend.product()
    batches = [(backend.draw(32, 96, seed=seed), backend.draw(32, 32, seed=seed + 5)) for seed in (2, 3)]
    alone = []
    for x, grad in batches:
        product(x, weight).backward(grad)
        alone.append(weight.grad.clone())
        weight.grad = None

    outs = [product(x, weight) for x, _ in batches]
    for (_, grad), out, expected in zip(reversed(batches), reversed(outs), reversed(alone), strict=True):
        out.backward(grad)
        assert torch.equal(weight.grad, expected)
        weight.grad = None


def fp8_config(backend: str, parallel: dict[str, Any] | None = None, **fp8: Any) -> Any:
    return make_config(
        model=SMALL,
        train={"precision": "bf16"},
        parallel=parallel or {},
        fp8={"recipe": "tensorwise", "backend": backend, **fp8},
    )


def test_model_trains_with_transformer_engine(package_root: Path) -> None:
    write_packages(package_root, TRANSFORMER_ENGINE)
    results = []
    for name, parallel in (
        ("megatrain", {}),
        ("transformer_engine", {}),
        ("transformer_engine", {"recompute": "selective"}),
        ("transformer_engine", {"recompute": "full"}),
        ("transformer_engine", {"offload_layers": 1}),
    ):
        config = fp8_config(name, parallel)
        rank_model = single_rank_model(config)
        loss = run_gradients(rank_model, random_tokens(config, seed=0))
        results.append((loss, gradients_by_name(rank_model)))

    (own_loss, own), (loss, found), *recomputed = results
    assert loss == pytest.approx(own_loss, rel=1e-2)
    assert found.keys() == own.keys()
    for again_loss, again in recomputed:
        assert again_loss == loss
        assert all(torch.equal(again[name], gradient) for name, gradient in found.items())


def test_replaced_projections_keep_parameters_and_checkpoints(package_root: Path) -> None:
    write_packages(package_root, TRANSFORMER_ENGINE)
    own = single_rank_model(fp8_config("megatrain"))
    rank_model = single_rank_model(fp8_config("transformer_engine", skip_layers=[1]))
    run_gradients(rank_model, random_tokens(rank_model.config, seed=0))
    modules = [one.pipeline.chunks[0].module for one in (own, rank_model)]
    first, second = (
        {type(module.multiply) for module in modules[1].blocks[layer].modules() if isinstance(module, Projection)}
        for layer in ("0", "1")
    )

    assert first == {TransformerEngineLinear}
    assert TransformerEngineLinear not in second
    names = [[name for name, _ in module.named_parameters()] for module in modules]
    assert names[0] == names[1]
    shards = [[(shard.kind, shard.shard.name) for shard in each.saved_shards()] for each in (own, rank_model)]
    assert shards[0] == shards[1]
