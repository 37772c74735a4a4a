"""Initial weights: the table of deviations, and the values that they depend on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config.model import ModelConfig
from megatrain.model import Transformer, initialize_
from tests.helpers.single_rank import make_config, parameters_by_name, single_rank_model

GPT: dict[str, Any] = {
    "vocab_size": 250, "seq_len": 32, "hidden_size": 64, "num_layers": 3, "num_heads": 4, "vocab_multiple": 8,
    "init_std": 0.05,
}  # fmt: skip
LLAMA: dict[str, Any] = GPT | {
    "norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "has_bias": False, "has_tied_head": False,
    "num_kv_heads": 2,
}  # fmt: skip
STYLES = {"gpt": GPT, "llama": LLAMA, "parallel": GPT | {"block": "parallel"}, "mixed": LLAMA | {"has_bias": True}}


def drawn(model: dict[str, Any], seed: int = 1) -> dict[str, Tensor]:
    config = ModelConfig(**model)
    found: dict[str, Tensor] = {}
    for name, parameter in Transformer(config).named_parameters():
        values = torch.full(parameter.shape, math.nan, dtype=torch.float64)
        initialize_(values, name, config, seed, tuple(parameter.shape), (0,) * parameter.dim())
        found[name] = values
    return found


@pytest.mark.slow(kept=["gpt-True", "gpt-False", "llama-True", "parallel-True"])
@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_deviation_of_every_parameter(style: str, is_scaled: bool) -> None:
    kinds = {"bias": 0, "scale": 0, "residual": 0, "matrix": 0}
    for name, values in drawn(STYLES[style] | {"is_residual_init_scaled": is_scaled}).items():
        if "bias" in name:
            kinds["bias"] += 1
            assert (values == 0).all(), name
        elif ".norm." in name:
            kinds["scale"] += 1
            assert (values == 1).all(), name
        else:
            is_residual = ".out." in name or ".down." in name
            kinds["residual" if is_residual else "matrix"] += 1
            std = 0.05 / math.sqrt(2 * 3) if is_residual and is_scaled else 0.05
            assert values.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * values.numel())), name
            assert abs(values.mean().item()) < 4 * std / math.sqrt(values.numel()), name

    has_bias, is_serial = style != "llama", style != "parallel"
    num_norms = 1 + 3 * (2 if is_serial else 1)
    num_norm_biases = num_norms if style in ("gpt", "parallel") else 0
    assert kinds == {
        "bias": num_norm_biases + (3 * 4 if has_bias else 0),
        "scale": num_norms,
        "residual": 3 * 2,
        "matrix": 3 * 2 + 2,  # qkv and up; token and position embeddings, or token embeddings and head
    }


def test_no_two_parameters_are_alike() -> None:
    matrices = {name: values for name, values in drawn(LLAMA).items() if (values.abs() < 0.9).all() and values.any()}
    assert len(matrices) == 3 * 4 + 2
    firsts = [values.flatten()[:1000] / values.std() for values in matrices.values()]
    correlations = torch.corrcoef(torch.stack(firsts)) - torch.eye(len(firsts), dtype=torch.float64)

    assert correlations.abs().max().item() < 5 / math.sqrt(1000)


def test_another_seed_gives_other_weights() -> None:
    first, second = drawn(GPT), drawn(GPT, seed=2)

    assert not (first["embedding.word.weight"] == second["embedding.word.weight"]).any()


def test_more_layers_do_not_change_the_other_layers() -> None:
    shallow = drawn(GPT | {"is_residual_init_scaled": False})
    deep = drawn(GPT | {"is_residual_init_scaled": False, "num_layers": 5})

    assert all(torch.equal(values, deep[name]) for name, values in shallow.items())


def test_vocabulary_padding_does_not_change_other_rows() -> None:
    wide = drawn(GPT | {"vocab_multiple": 128})["embedding.word.weight"]

    assert torch.equal(wide[:250], drawn(GPT)["embedding.word.weight"][:250])


def test_tied_head_is_one_parameter() -> None:
    tied, untied = Transformer(ModelConfig(**GPT)), Transformer(ModelConfig(**GPT | {"has_tied_head": False}))
    assert tied.loss_head is not None
    assert tied.embedding is not None
    assert untied.loss_head is not None
    assert untied.embedding is not None

    assert tied.loss_head.weight is tied.embedding.word.weight
    assert "loss_head.weight" not in dict(tied.named_parameters())
    assert untied.loss_head.weight is not untied.embedding.word.weight
    assert "loss_head.weight" in dict(untied.named_parameters())


@pytest.mark.slow(kept=["llama", "parallel"])
@pytest.mark.parametrize("style", STYLES)
def test_rank_model_has_the_initial_weights(style: str) -> None:
    config = make_config(model=STYLES[style], train={"steps": 1, "precision": "fp64", "seed": 5})
    expected = drawn(STYLES[style], seed=5)
    found = parameters_by_name(single_rank_model(config))

    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_precisions_round_the_same_numbers(precision: str, dtype: torch.dtype) -> None:
    config = make_config(model=LLAMA, train={"steps": 1, "precision": precision, "seed": 5})
    rank_model = single_rank_model(config)
    found = parameters_by_name(rank_model)
    masters = {shard.name: shard for kind, shard, _ in rank_model.optimizer.flat_shards() if kind == "master"}

    for name, values in drawn(LLAMA, seed=5).items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], values.float().to(dtype)), name
        assert masters[name].tensor.dtype == torch.float32


def test_tied_head_in_a_rank_model_is_one_parameter() -> None:
    (chunk,) = single_rank_model(make_config(model=GPT)).pipeline.chunks

    assert chunk.module.loss_head.weight is chunk.module.embedding.word.weight
    assert chunk.module.loss_head.weight.data_ptr() == chunk.module.embedding.word.weight.data_ptr()
