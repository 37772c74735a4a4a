"""Rules of the parameter groups: each has parameters, and every setting has an effect."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.config.checks.context import Context
from megatrain.config.config import is_parameter_group
from megatrain.config.options import options_of
from megatrain.config.parameter_group import AS_OPTIMIZER, ParameterGroupConfig, first_matching
from megatrain.config.parameter_names import parameter_sizes
from megatrain.config.problem import Problem
from megatrain.config.proposals import closest_name
from megatrain.config.toml_text import setting, value_text

_NAMING_KEYS = tuple(
    f"model.{name}"
    for name in (
        "num_layers",
        "block",
        "norm",
        "branch_norm",
        "mlp",
        "positions",
        "qk_norm",
        "has_bias",
        "has_qkv_bias",
        "has_tied_head",
    )
)
"""The keys that decide which parameters a model has."""


def parameter_group_problems(context: Context) -> Iterator[Problem]:
    """Yield what is wrong with the parameter groups."""
    sections = {name: one for name, one in context.config.sections.items() if is_parameter_group(name)}
    with_pattern = {name: one for name, one in sections.items() if one.pattern}
    for section, group in sections.items():
        if section not in with_pattern:
            yield from _unused_problems(section, group)
        if AS_OPTIMIZER < group.weight_decay < 0.0:
            yield Problem(
                (f"{section}.weight_decay",),
                f"{section}.weight_decay={group.weight_decay} is negative; use 0 or more, or -1 for "
                "optimizer.weight_decay",
            )
    if with_pattern and context.knows(*_NAMING_KEYS):
        yield from _empty_groups(list(context.config.parameter_groups), list(with_pattern), context)


def _empty_groups(groups: list[ParameterGroupConfig], sections: list[str], context: Context) -> Iterator[Problem]:
    names = list(parameter_sizes(context.config.model))
    filled = {first_matching(name, groups) for name in names}
    for index, (section, group) in enumerate(zip(sections, groups, strict=True)):
        if index in filled:
            continue
        key = f"{section}.pattern"
        if any(first_matching(name, [group]) is not None for name in names):
            text = (
                f"{setting(key, group.pattern)} matches only parameters that earlier groups have; the first match "
                "counts: put this group before them"
            )
        else:
            close = closest_name(group.pattern, names) or names[-1]
            text = f"{setting(key, group.pattern)} matches no parameter of this model; one is {value_text(close)}"
        yield Problem((key, *_NAMING_KEYS), text)


def _unused_problems(section: str, group: ParameterGroupConfig) -> Iterator[Problem]:
    for name, option in options_of(ParameterGroupConfig).items():
        value = getattr(group, name)
        if value != option.default:
            yield Problem(
                (f"{section}.{name}", f"{section}.pattern"),
                f"{section}.{name}={value_text(value)} does nothing without {section}.pattern; set the pattern, or "
                f"remove {name}",
            )
