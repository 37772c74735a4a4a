"""The parameters that variants of other packages have: their names in the model, their shapes and initial values.

A variant declares them in its attribute `own_parameters`, which maps names to VariantParameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.config.model import ModelConfig
from megatrain.config.variants import load_variant
from megatrain.contracts.errors import ConfigError

_DIMS: Mapping[str, tuple[str, ...]] = {
    "mlp": ("", "F"),
    "attention": ("", "D", "GR", "GRD"),
    "norm": ("", "H"),
}
"""Key of [model] -> the dims that a parameter of its variants may have."""


@dataclass(frozen=True, slots=True)
class VariantParameter:
    """A parameter of a variant's module.

    dims: a letter for each dim of the unsharded parameter: H hidden, F ffn, G key-value heads, R query heads per
    key-value head, D width of a head; "" is a scalar. Tensor-parallel ranks shard F and the heads (G, R), but not H and
    D.
    initial: the value of all elements before training.
    """

    dims: str = ""
    initial: float = 0.0


@dataclass(frozen=True, slots=True)
class ShapedParameter:
    """A parameter of a variant in a model. `shape` is that of the unsharded parameter."""

    declared: VariantParameter
    shape: tuple[int, ...]


def own_parameters(model: ModelConfig, key: str) -> dict[str, ShapedParameter]:
    """Return the parameters of the variant that model.`key` names, by name in its module; none for built-in variants.

    Raises: ConfigError when the variant's declaration is not a mapping of names to VariantParameter with allowed dims.
    """
    if model.is_own(key):
        return {}
    declared = getattr(load_variant(key, getattr(model, key)), "own_parameters", {})
    if not isinstance(declared, Mapping):
        raise ConfigError([f"{_subject(model, key)}: own_parameters is a {type(declared).__name__}; use a mapping"])
    problems = [problem for name, parameter in declared.items() for problem in _problems(model, key, name, parameter)]
    if problems:
        raise ConfigError(problems)
    sizes = {
        "H": model.hidden_size,
        "F": model.resolved_ffn_size,
        "G": model.resolved_num_kv_heads,
        "R": model.num_heads // model.resolved_num_kv_heads,
        "D": model.resolved_head_dim,
    }
    return {
        name: ShapedParameter(parameter, tuple(sizes[dim] for dim in parameter.dims))
        for name, parameter in declared.items()
    }


def parameters_by_path(model: ModelConfig) -> dict[str, ShapedParameter]:
    """Return the parameters of all variants, by the last parts of their names: `mlp.activation.slope`.

    A parameter belongs to a path if its name ends with a dot and the path.
    """
    places = {"mlp": ("mlp.activation",), "attention": ("attention.attend_heads",), "norm": ("norm", "output_norm")}
    return {
        f"{place}.{name}": parameter
        for key, paths in places.items()
        for name, parameter in own_parameters(model, key).items()
        for place in paths
    }


def _problems(model: ModelConfig, key: str, name: Any, parameter: Any) -> Iterator[str]:
    subject = f"{_subject(model, key)}: own_parameters[{name!r}]"
    if not isinstance(name, str) or not name.isidentifier():
        yield f"{subject}: the name must be an identifier"
    if not isinstance(parameter, VariantParameter):
        yield f"{subject} is a {type(parameter).__name__}; use megatrain.config.variant_parameters.VariantParameter"
    elif parameter.dims not in _DIMS[key]:
        yield f'{subject}: dims="{parameter.dims}" is not allowed; use {", ".join(repr(dims) for dims in _DIMS[key])}'


def _subject(model: ModelConfig, key: str) -> str:
    return f'model.{key}="{getattr(model, key)}"'
