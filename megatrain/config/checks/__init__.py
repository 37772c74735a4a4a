"""Every rule on the values of a configuration, one pure pass per concern; nothing here changes a value.

First each key is checked against its own range, then the rules between keys. A rule that uses a wrong or missing value
is skipped, so that each mistake is reported once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megatrain.config.checks.batch import batch_problems
from megatrain.config.checks.context import Context
from megatrain.config.checks.data import data_problems
from megatrain.config.checks.fp8 import fp8_problems
from megatrain.config.checks.kernels import kernels_problems
from megatrain.config.checks.lengths import length_problems
from megatrain.config.checks.model import model_problems
from megatrain.config.checks.optimizer import optimizer_problems, parameter_group_problems
from megatrain.config.checks.parallel import parallel_problems
from megatrain.config.checks.pictures import picture_problems
from megatrain.config.checks.run import run_problems, training_problems
from megatrain.config.config import Config
from megatrain.config.options import Value, options_of
from megatrain.config.origin import ValueOrigin
from megatrain.config.problem import Problem
from megatrain.config.toml_text import setting

__all__ = ["check"]


def check(
    config: Config,
    origins: Mapping[str, ValueOrigin],
    world_size: int | None,
    doubtful: Collection[str] = (),
    *,
    is_for_training: bool = False,
) -> list[str]:
    """Return every problem of the values, each with its origin; empty if the run can start.

    `origins` may be empty for a configuration made by a program: then messages name no origin. Without a world size,
    dp_size = 0 counts as 1, the most lenient case. Problems that use `doubtful` keys ("section.key") are left out: they
    were reported before.
    """
    in_range, problems = _own_ranges(config)
    untrusted = frozenset(doubtful).union(key for problem in problems for key in problem.keys)
    context = Context(in_range, world_size, untrusted)
    passes = (
        model_problems,
        parallel_problems,
        batch_problems,
        optimizer_problems,
        parameter_group_problems,
        data_problems,
        length_problems,
        picture_problems,
        kernels_problems,
        fp8_problems,
        run_problems,
    )
    between_keys = [problem for check_pass in passes for problem in check_pass(context)]
    if is_for_training:
        between_keys += training_problems(in_range)
    problems += [problem for problem in between_keys if untrusted.isdisjoint(problem.keys)]
    return [problem.located(origins) for problem in problems]


def _own_ranges(config: Config) -> tuple[Config, list[Problem]]:
    """Check each key by itself; return the configuration with harmless values in place of wrong ones."""
    problems = []
    values: dict[str, dict[str, Value]] = {}
    for section, given in config.sections.items():
        for name, option in options_of(given.__class__).items():
            value = getattr(given, name)
            violation = option.violation(value)
            if violation is not None:
                key = f"{section}.{name}"
                problems.append(Problem((key,), f"{setting(key, value)} {violation}"))
            values.setdefault(section, {})[name] = value if violation is None else option.placeholder
    return Config.of_values(values), problems
