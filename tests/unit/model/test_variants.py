"""Variants that another package registers: found by name, built, counted, and refused where they are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config import num_parameters
from megatrain.config.model import ModelConfig
from megatrain.config.options import options_of
from megatrain.config.variants import load_families, load_variant
from megatrain.contracts.errors import ConfigError
from megatrain.hf.families import family_for_export
from megatrain.model import TokenContext, Transformer

SIZES: dict[str, Any] = {
    "vocab_size": 50, "seq_len": 9, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "vocab_multiple": 1, "has_bias": False,
}  # fmt: skip
SOURCE = """
import torch
from torch import nn
from megatrain.model.frequencies import Frequencies

class ReGlu(nn.Module):
    is_gated = True
    def forward(self, x, bias):
        gate, up = (x if bias is None else x + bias).unbind(-2)
        return gate.relu() * up

class Scale(nn.Module):
    num_vectors = 1
    def __init__(self, hidden_size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
    def forward(self, stream):
        return stream.total() * self.weight, stream.total()

def capped(q, k, v, pattern, cap=1.5):
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = cap * torch.tanh(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 / cap)
    return ((scores + pattern.mask(q.device, q.dtype)).softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)

def none_at_all(model, seq_len):
    return Frequencies(torch.zeros(model.rotated_dim // 2, dtype=torch.float64))
"""
ENTRY_POINTS = {
    "megatrain.activations": "reglu = others:ReGlu\nbroken = missing_module:X",
    "megatrain.norms": "scale = others:Scale",
    "megatrain.attentions": "capped = others:capped",
    "megatrain.rope_scalings": "still = others:none_at_all",
    "megatrain.hf_families": "lost = missing_family:Lost",
}
Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put packages with the variants on the path, as pip would."""
    load_variant.cache_clear()
    (tmp_path / "others.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(name: str) -> None:
        information = tmp_path / f"{name}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        points = "\n".join(f"[{group}]\n{lines}" for group, lines in ENTRY_POINTS.items())
        (information / "entry_points.txt").write_text(
            points.replace("others:ReGlu", "others:ReGlu" if name == "one" else "elsewhere:ReGlu")
        )

    yield add
    load_variant.cache_clear()


def outputs(**keys: Any) -> Tensor:
    model = Transformer(ModelConfig(**(SIZES | keys))).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
        tokens = torch.randint(0, 50, (9, 2), generator=generator)
        return model.hidden(tokens, TokenContext(torch.arange(2), 9))


def test_variants_are_built_and_counted(install: Install) -> None:
    install("one")
    for keys in (
        {"mlp": "reglu"},
        {"norm": "scale"},
        {"attention": "capped"},
        {"positions": "rope", "rope_scaling": "still"},
    ):
        model = ModelConfig(**(SIZES | keys))
        with torch.device("meta"):
            built = sum(parameter.numel() for parameter in Transformer(model).parameters())
        assert num_parameters(model) == built, keys
        for key, value in keys.items():
            assert options_of(ModelConfig)[key].violation(value) is None
    assert ModelConfig(**(SIZES | {"mlp": "reglu"})).is_mlp_gated


def test_a_variant_is_what_is_computed(install: Install) -> None:
    install("one")
    torch.testing.assert_close(outputs(attention="capped"), outputs(attention_softcap=1.5), rtol=1e-12, atol=1e-12)
    # angles of zero turn nothing, and without an order of its own a token sees a set
    still = {"positions": "rope", "rope_scaling": "still", "rope_scaling_factor": 2.0}
    assert not torch.equal(outputs(**still), outputs(positions="rope"))


def test_a_variant_is_not_exported_as_something_else(install: Install) -> None:
    install("one")
    neox = {"positions": "rope", "block": "parallel_two_norms", "has_bias": True, "num_kv_heads": 4, "mlp": "gelu"}
    llama = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu"}
    for keys, named in (
        (neox | {"mlp": "reglu"}, 'model.mlp="reglu"'),
        (neox | {"rope_scaling": "still", "rope_scaling_factor": 2.0}, 'model.rope_scaling="still"'),
        (llama | {"rope_scaling": "still", "rope_scaling_factor": 2.0}, 'model.rope_scaling="still"'),
        (llama | {"attention": "capped"}, 'model.attention="capped"'),
    ):
        with pytest.raises(ConfigError) as raised:
            family_for_export(ModelConfig(**(SIZES | keys)))
        assert [problem.startswith(f"{named} cannot be exported") for problem in raised.value.problems] == [True]


def test_what_no_package_has_is_refused(install: Install) -> None:
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
