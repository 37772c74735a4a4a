"""The parameters that variants of other packages have: their names in the model, their shapes and initial values.

A variant declares them in its attribute `own_parameters`, which maps names to VariantParameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatrain.config.model import ModelConfig
from megatrain.config.variants import load_variant
from megatrain.contracts.errors import ConfigError

_DIMS: Mapping[str, tuple[str, ...]] = {
    "mlp": ("", "F"),
    "attention": ("", "D", "GR", "GRD"),
    "norm": ("", "H"),
    "add": ("", "H", "S", "SH"),
    "rotate": ("", "D", "GR", "GRD"),
}
"""Key of [model], or method of a variant of `positions` -> the dims that a parameter of such a variant may have."""
PositionMethod = Literal["add", "rotate"]


@dataclass(frozen=True, slots=True)
class VariantParameter:
    """A parameter of a variant's module.

    dims: a letter for each dim of the unsharded parameter: H hidden, F ffn, G key-value heads, R query heads per
    key-value head, D width of a head, S sequence; "" is a scalar. Tensor-parallel ranks shard F and the heads (G, R),
    but not H, D and S.
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
    """Return the parameters of the variant that model.`key` names, by name in its module; none for built-in values.

    Raises: ConfigError as `load_variant` and `position_methods`, and when the variant's declaration is not a mapping of
    names to VariantParameter with allowed dims, or belongs to positions with both methods.
    """
    if model.is_own(key):
        return {}
    declared = getattr(load_variant(key, getattr(model, key)), "own_parameters", {})
    if not isinstance(declared, Mapping):
        raise ConfigError([f"{_subject(model, key)}: own_parameters is a {type(declared).__name__}; use a mapping"])
    place = key
    if key == "positions":
        place, *others = position_methods(model)
        if declared and others:
            both = "own_parameters with the methods add and rotate, which are called in different modules"
            raise ConfigError([f"{_subject(model, key)}: {both}; use a class with one of them"])
    allowed = _DIMS[place] if declared else ()
    problems = [
        problem for name, parameter in declared.items() for problem in _problems(model, key, name, parameter, allowed)
    ]
    if problems:
        raise ConfigError(problems)
    sizes = {
        "H": model.hidden_size,
        "F": model.resolved_ffn_size,
        "G": model.resolved_num_kv_heads,
        "R": model.num_heads // model.resolved_num_kv_heads,
        "D": model.resolved_head_dim,
        "S": model.seq_len,
    }
    return {
        name: ShapedParameter(parameter, tuple(sizes[dim] for dim in parameter.dims))
        for name, parameter in declared.items()
    }


def position_methods(model: ModelConfig) -> tuple[PositionMethod, ...]:
    """Return the methods of the variant that model.positions names: add, rotate or both; none for built-in positions.

    Raises: ConfigError as `load_variant`, and when the variant has neither method.
    """
    if model.is_own("positions"):
        return ()
    variant = load_variant("positions", model.positions)
    methods: tuple[PositionMethod, ...] = ("add", "rotate")
    found = tuple(method for method in methods if callable(getattr(variant, method, None)))
    if not found:
        raise ConfigError([f"{_subject(model, 'positions')}: has no method add or rotate; define one of them"])
    return found


def parameters_of_positions(model: ModelConfig, method: PositionMethod) -> dict[str, ShapedParameter]:
    """Return the parameters of the variant of positions if it has `method`, by name in its module; else none."""
    return own_parameters(model, "positions") if method in position_methods(model) else {}


def parameters_by_path(model: ModelConfig) -> dict[str, ShapedParameter]:
    """Return the parameters of all variants, by the last parts of their names: `mlp.activation.slope`.

    A parameter belongs to a path if its name ends with a dot and the path.
    """
    places = {
        "mlp": ("mlp.activation",),
        "attention": ("attention.attend_heads",),
        "norm": ("norm", "output_norm"),
        "positions": ("positions",),
    }
    return {
        f"{place}.{name}": parameter
        for key, paths in places.items()
        for name, parameter in own_parameters(model, key).items()
        for place in paths
    }


def _problems(model: ModelConfig, key: str, name: Any, parameter: Any, allowed: Sequence[str]) -> Iterator[str]:
    subject = f"{_subject(model, key)}: own_parameters[{name!r}]"
    if not isinstance(name, str) or not name.isidentifier():
        yield f"{subject}: the name must be an identifier"
    if not isinstance(parameter, VariantParameter):
        yield f"{subject} is a {type(parameter).__name__}; use megatrain.config.variant_parameters.VariantParameter"
    elif parameter.dims not in allowed:
        yield f'{subject}: dims="{parameter.dims}" is not allowed; use {", ".join(repr(dims) for dims in allowed)}'


def _subject(model: ModelConfig, key: str) -> str:
    return f'model.{key}="{getattr(model, key)}"'
