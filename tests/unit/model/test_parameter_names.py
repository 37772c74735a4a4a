"""The names and sizes that are known without a model equal those of the model."""

from __future__ import annotations

from itertools import product

from megatrain.config.model import ModelConfig
from megatrain.config.model_size import num_parameters, parameter_sizes
from megatrain.hf.tensor_map import parameter_shapes

SIZES = {"vocab_size": 90, "seq_len": 16, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_multiple": 8}
STYLES = product(
    [
        {"block": "serial"},
        {"block": "parallel"},
        {"block": "parallel_two_norms"},
        {"branch_norm": "both", "norm": "rmsnorm_zero_centered", "mlp": "geglu", "qk_norm": "all_heads"},
        {"branch_norm": "output"},
    ],
    [{}, {"has_bias": False}, {"has_bias": False, "has_qkv_bias": True}],
    [{}, {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "qk_norm": "head", "num_kv_heads": 2}],
    [{}, {"has_tied_head": False}],
)


def test_names_and_sizes_are_those_of_the_model() -> None:
    for style in STYLES:
        model = ModelConfig(**SIZES, **{key: value for one in reversed(style) for key, value in one.items()})
        found = parameter_sizes(model)
        numels = {}
        for name, shape in parameter_shapes(model).items():
            numels[name] = 1
            for size in shape:
                numels[name] *= size

        assert list(found) == list(dict.fromkeys(found))
        assert found == numels, style
        assert sum(found.values()) == num_parameters(model)
