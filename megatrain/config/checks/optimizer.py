"""Rules of the update rule, of the learning-rate schedule and of the parameter groups.

Each group has parameters, and every setting has an effect.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.config.checks.context import Context
from megatrain.config.config import Config
from megatrain.config.model_size import parameter_sizes
from megatrain.config.optimizer import AS_OPTIMIZER, OptimizerConfig, ParameterGroupConfig, first_matching
from megatrain.config.problem import Problem, closest_name, unset_problems, unused_problems
from megatrain.config.toml_text import setting, value_text

HORIZON_KEYS = ("optimizer.lr_decay_steps", "train.steps", "optimizer.lr_schedule")

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
"""The keys that determine which parameters a model has."""


def optimizer_problems(context: Context) -> Iterator[Problem]:
    """Yield what makes the learning-rate schedule impossible, and keys without an effect."""
    optimizer = context.config.optimizer
    if optimizer.min_lr > optimizer.lr and optimizer.lr_schedule != "constant":
        yield Problem(
            ("optimizer.min_lr", "optimizer.lr"),
            f"optimizer.min_lr={optimizer.min_lr} must be at most optimizer.lr={optimizer.lr}; "
            f"use {optimizer.lr / 10:g} (a tenth of lr) or 0",
        )
    yield from _unused_by_rule(optimizer)
    yield from _unused_problems(context.config)
    yield from _length_problems(context.config)


def _unused_by_rule(optimizer: OptimizerConfig) -> Iterator[Problem]:
    """Yield the keys that the chosen update rule does not use."""
    unused = []
    if optimizer.name not in ("muon", "sgd"):
        unused += [("momentum", "muon"), ("has_nesterov", "muon")]
    if optimizer.name != "muon":
        unused.append(("muon_precision", "muon"))
    if optimizer.name == "sgd":
        unused += [("beta1", "adamw"), ("beta2", "adamw"), ("eps", "adamw")]
    for name, needed in unused:
        yield from unused_problems("optimizer", optimizer, name, "name", needed)


def _unused_problems(config: Config) -> Iterator[Problem]:
    optimizer = config.optimizer
    is_wsd = optimizer.lr_schedule == "wsd"
    if is_wsd and optimizer.wsd_decay_steps == 0:
        tenth = max(1, config.resolved_lr_decay_steps // 10)
        yield Problem(
            ("optimizer.wsd_decay_steps", "optimizer.lr_schedule"),
            f'optimizer.wsd_decay_steps=0 leaves optimizer.lr_schedule="wsd" without its decay; '
            f"use {tenth} (a tenth of the run) or another schedule",
        )
    if not is_wsd:
        yield from unused_problems("optimizer", optimizer, "wsd_decay_steps", "lr_schedule", "wsd")
    if optimizer.lr_schedule == "constant":
        for name in ("min_lr", "lr_decay_steps"):
            yield from unused_problems("optimizer", optimizer, name, "lr_schedule", "cosine")


def _length_problems(config: Config) -> Iterator[Problem]:
    """The warm-up and the decay must fit before the step at which the schedule ends."""
    optimizer, end = config.optimizer, config.resolved_lr_decay_steps
    end_key = "optimizer.lr_decay_steps" if optimizer.lr_decay_steps else "train.steps"
    warmup, decay = optimizer.lr_warmup_steps, optimizer.wsd_decay_steps
    if optimizer.lr_schedule == "wsd":
        if decay and warmup + decay > end:
            yield Problem(
                ("optimizer.wsd_decay_steps", "optimizer.lr_warmup_steps", *HORIZON_KEYS),
                f"optimizer.lr_warmup_steps + optimizer.wsd_decay_steps = {warmup} + {decay} = {warmup + decay} must "
                f"be at most {end_key}={end}; "
                + _fewer("wsd_decay_steps", end - warmup, "lr_warmup_steps", end - decay),
            )
        return
    # A decay over zero steps has no slope, so linear and cosine need at least one step after warm-up.
    longest = end if optimizer.lr_schedule == "constant" else end - 1
    if warmup > longest:
        yield Problem(
            ("optimizer.lr_warmup_steps", *HORIZON_KEYS),
            f"optimizer.lr_warmup_steps={warmup} must be {'at most' if longest == end else 'less than'} "
            f"{end_key}={end}; use {longest} or less, or {end_key} of at least {warmup + end - longest}",
        )


def _fewer(first: str, first_limit: int, second: str, second_limit: int) -> str:
    """Return which of two lengths can shrink, and to what."""
    ways = [f"{name}={limit}" for name, limit in ((first, first_limit), (second, second_limit)) if limit >= 0]
    return f"use {' or '.join(ways)} or less, or more steps" if ways else "use less of both, or more steps"


def parameter_group_problems(context: Context) -> Iterator[Problem]:
    """Yield what is wrong with the parameter groups."""
    sections = context.config.sections_of("parameter_group")
    with_pattern = {name: group for name, group in sections.items() if group.pattern}
    for section, group in sections.items():
        if section not in with_pattern:
            yield from unset_problems(section, group, "pattern")
        if AS_OPTIMIZER < group.weight_decay < 0.0:
            yield Problem(
                (f"{section}.weight_decay",),
                f"{section}.weight_decay={group.weight_decay} is negative; use 0 or more, or -1 for "
                "optimizer.weight_decay",
            )
    if with_pattern and context.are_known(*_NAMING_KEYS):
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
