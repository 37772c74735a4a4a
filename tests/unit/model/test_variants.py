"""Variants that another package registers: found by name, built, counted, and refused if they are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config.model import ModelConfig
from megatrain.config.model_size import num_parameters, parameter_sizes
from megatrain.config.options import options_of
from megatrain.config.variants import load_families, load_variant
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.layout import Layout
from megatrain.hf.families import family_for_export
from megatrain.model import TokenContext, Transformer
from megatrain.model.initial import initialize_
from megatrain.parallel.decoder import decoder_table
from megatrain.parallel.tensor_plan import TensorPlan, apply_tensor_plan
from tests.helpers.drawn_parameters import draw_parameters
from tests.helpers.single_rank import simulated_group
from tests.helpers.variant_package import on_the_path, write_variant_package

SIZES: dict[str, Any] = {
    "vocab_size": 50, "seq_len": 9, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "vocab_multiple": 1, "has_bias": False,
}  # fmt: skip
Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Install]:
    """Install the package with the variants, under the given name, for one test."""
    with on_the_path(tmp_path):
        yield partial(write_variant_package, tmp_path)


def outputs(**keys: Any) -> Tensor:
    model = Transformer(ModelConfig(**(SIZES | keys))).double()
    tokens = torch.randint(0, 50, (9, 2), generator=draw_parameters(model, 1.0))
    with torch.no_grad():
        return model.hidden(tokens, TokenContext(torch.arange(2), 9))


def test_variants_are_built_and_counted(install: Install) -> None:
    install("one")
    for keys in (
        {"mlp": "reglu"},
        {"mlp": "leaky_glu"},
        {"norm": "dynamic_tanh", "branch_norm": "both"},
        {"attention": "capped"},
        {"attention": "sink"},
        {"positions": "none"},
        {"positions": "counted"},
        {"positions": "leaning"},
        {"positions": "both"},
        {"positions": "rope", "rope_scaling": "still"},
    ):
        model = ModelConfig(**(SIZES | keys))
        with torch.device("meta"):
            built = sum(parameter.numel() for parameter in Transformer(model).parameters())
        assert num_parameters(model) == sum(parameter_sizes(model).values()) == built, keys
        for key, value in keys.items():
            assert options_of(ModelConfig)[key].violation(value) is None
    assert ModelConfig(**(SIZES | {"mlp": "reglu"})).is_mlp_gated


def test_a_variant_is_what_is_computed(install: Install) -> None:
    install("one")
    torch.testing.assert_close(outputs(attention="capped"), outputs(attention_softcap=1.5), rtol=1e-12, atol=1e-12)
    # Angles of zero rotate nothing, and without a position a token sees a set.
    still = {"positions": "rope", "rope_scaling": "still", "rope_scaling_factor": 2.0}
    assert not torch.equal(outputs(**still), outputs(positions="rope"))
    torch.testing.assert_close(outputs(**still), outputs(positions="none"), rtol=1e-12, atol=1e-12)
    assert not torch.equal(outputs(positions="both"), outputs(positions="none"))


def test_declared_parameters_are_built_and_not_decayed(install: Install) -> None:
    install("one")
    model = ModelConfig(**(SIZES | {"mlp": "leaky_glu", "norm": "dynamic_tanh", "attention": "sink"}))
    found = {}
    for name, parameter in Transformer(model).named_parameters():
        leaf = name.rpartition(".")[2]
        if leaf in ("slope", "offset", "alpha", "sink", "temper"):
            initialize_(parameter.data, name, model, 0, parameter.shape, (0,) * parameter.dim())
            found[leaf] = tuple(parameter.shape), parameter.unique().tolist()
    ffn = model.resolved_ffn_size
    assert found == {
        "slope": ((ffn,), [0.25]),
        "offset": ((), [0.5]),
        "alpha": ((), [0.5]),
        "sink": ((2, 2), [pytest.approx(0.1)]),
        "temper": ((), [1.0]),
    }
    with torch.device("meta"):
        chunk = Transformer(model)
    plan = TensorPlan(decoder_table(model), Layout(), 0, simulated_group("tp", 1, 0), "none", model.vocab_size)
    decayed = {one.name.rpartition(".")[2] for one in apply_tensor_plan(chunk, plan)[0] if one.is_decayed}
    assert decayed == {"weight", "position"}


def test_parameters_of_positions_are_in_one_place(install: Install) -> None:
    install("one")
    for variant, expected in (
        ("counted", {"embedding.positions.pace": (16,), "embedding.positions.table": (9, 16)}),
        (
            "leaning",
            {
                f"blocks.{layer}.attention_branch.attention.positions.{name}": shape
                for layer in (0, 1)
                for name, shape in (("stretch", (2, 2)), ("lean", (4,)))
            },
        ),
    ):
        model = Transformer(ModelConfig(**(SIZES | {"positions": variant})))
        found = {name: tuple(one.shape) for name, one in model.named_parameters() if ".positions." in name}
        assert found == expected


@pytest.mark.parametrize(
    ("variant", "problem"),
    [
        ("neither", 'model.positions="neither": has no method add or rotate; define one of them'),
        ("both_with_parameters", "own_parameters with the methods add and rotate, .*; use a class with one of them"),
    ],
)
def test_unusable_positions_are_refused(variant: str, problem: str, install: Install) -> None:
    install("one")
    with pytest.raises(ConfigError, match=problem):
        num_parameters(ModelConfig(**(SIZES | {"positions": variant})))


@pytest.mark.parametrize(
    ("variant", "problems"),
    [
        ("no_mapping", ['model.mlp="no_mapping": own_parameters is a list; use a mapping']),
        (
            "wrong_dims",
            [
                ("model.mlp=\"wrong_dims\": own_parameters['slope']: dims=\"G\" is not allowed; use '', 'F'"),
                "model.mlp=\"wrong_dims\": own_parameters['a b']: the name must be an identifier",
                (
                    "model.mlp=\"wrong_dims\": own_parameters['scale'] is a float; "
                    "use megatrain.config.variant_parameters.VariantParameter"
                ),
            ],
        ),
    ],
)
def test_wrong_declaration_of_parameters_is_refused(variant: str, problems: list[str], install: Install) -> None:
    install("one")
    with pytest.raises(ConfigError) as raised:
        num_parameters(ModelConfig(**(SIZES | {"mlp": variant})))
    assert list(raised.value.problems) == problems


def test_a_variant_is_not_exported_as_something_else(install: Install) -> None:
    install("one")
    neox = {"positions": "rope", "block": "parallel_two_norms", "has_bias": True, "num_kv_heads": 4, "mlp": "gelu"}
    llama = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu"}
    for keys, named in (
        (neox | {"mlp": "reglu"}, 'model.mlp="reglu"'),
        (neox | {"rope_scaling": "still", "rope_scaling_factor": 2.0}, 'model.rope_scaling="still"'),
        (llama | {"rope_scaling": "still", "rope_scaling_factor": 2.0}, 'model.rope_scaling="still"'),
        (llama | {"attention": "capped"}, 'model.attention="capped"'),
        (llama | {"positions": "leaning"}, 'model.positions="leaning"'),
        (llama | {"positions": "none"}, 'model.positions="none"'),
    ):
        with pytest.raises(ConfigError) as raised:
            family_for_export(ModelConfig(**(SIZES | keys)))
        assert [problem.startswith(f"{named} cannot be exported") for problem in raised.value.problems] == [True]


def test_unknown_or_broken_variant_is_refused(install: Install) -> None:
    rule = options_of(ModelConfig)["mlp"].violation("reglu")
    assert rule == 'is not allowed; use "gelu", "gelu_exact", "swiglu" or "geglu", or a variant of another package'
    with pytest.raises(ConfigError, match=r'model\.mlp="reglu" is no entry point of the group megatrain\.activations'):
        load_variant("mlp", "reglu")

    install("one")
    with pytest.raises(
        ConfigError, match=r'"broken": missing_module:X of the package one cannot be imported: ModuleNot'
    ):
        load_variant("mlp", "broken")

    with pytest.raises(
        ConfigError, match=r'"lost" of the group megatrain.hf_families: missing_family:Lost of the package'
    ):
        load_families()

    install("two")
    with pytest.raises(
        ConfigError, match=r'entry point "reglu" of the group megatrain.activations: .* one, two; keep one'
    ):
        load_variant("mlp", "reglu")
