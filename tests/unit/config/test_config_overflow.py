"""Numbers that overflow where they are used: each numeric key refuses them, and a dry run accepts its bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from megatrain.config.checks import check
from megatrain.config.config import all_options
from megatrain.config.load import load_config
from megatrain.config.options import LARGEST_NUMBER, LARGEST_OF_UNIT, LONGEST_S
from megatrain.contracts.errors import ConfigError
from megatrain.planning.run_plan import plan_run
from tests.helpers.source_tree import ROOT
from tests.helpers.training_case import make_config

DEMO = ROOT / "configs" / "demo.toml"
NUMERIC = {
    f"{section}.{name}": option
    for section, options in all_options().items()
    for name, option in options.items()
    if option.kind in ("int", "float", "list of int") and not option.choices
}
FLOATS = ["1e300", "1e38", "3.5e38", "-1e300", "1e-300", "1e-400", "-1e-400", "inf", "nan", str(10**400)]
INTEGERS = [str(2**63), str(2**62), str(-(2**63)), str(10**400)]


def problems_of_values(values: Mapping[str, str]) -> tuple[str, ...]:
    """Return the problems of the demo's configuration with other values of some keys."""
    try:
        load_config(DEMO, [f"--{key}={value}" for key, value in values.items()])
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("is_float", [True, False], ids=["floats", "integers"])
def test_absurd_numbers_are_refused_with_key_rule_and_hint(is_float: bool) -> None:
    options = {key: option for key, option in NUMERIC.items() if (option.kind == "float") is is_float}
    assert len(options) > 20
    for value in FLOATS if is_float else INTEGERS:
        problems = problems_of_values(
            {key: f"[{value}]" if option.kind == "list of int" else value for key, option in options.items()}
        )
        for key in options:
            (problem,) = [one for one in problems if one.startswith(f"{key}=")] or [f"--{key}={value} is accepted"]
            assert "use " in problem, problem


def test_refused_number_is_explained_with_the_bound() -> None:
    for key, value, rule in [
        ("optimizer.lr", "1e38", "optimizer.lr=1e+38 is out of range; use a value > 0 and <= 1000"),
        ("optimizer.eps", "1e-46", "optimizer.eps=1e-46 is too close to 0; use a value of at least 1e-30"),
        ("train.z_loss", "1e-300", "train.z_loss=1e-300 is too close to 0; use a value of at least 1e-30, or 0"),
        ("train.z_loss", "1_0.0E-400", "train.z_loss=1_0.0E-400 is too close to 0; use a value of at least 1e-30, or"),
        ("optimizer.lr", "1e-400", "optimizer.lr=1e-400 is out of range; use a value > 0 and <= 1000"),
        ("train.steps", "1e-400", "train.steps=1e-400 must be an integer"),
        ("recovery.hang_floor_s", "1e-9", "is too close to 0; use a value of at least 0.001"),
        ("diagnostics.spool_mb", str(10**13), "use a value >= 1 and <= 1000000000000"),
    ]:
        (problem,) = problems_of_values({key: value})
        assert rule in problem


def test_zero_is_not_refused_as_too_close_to_0() -> None:
    for zero in ("0.0", "0e-400", "0.0E-4", "-0.0e5", "0"):
        assert problems_of_values({"train.z_loss": zero}) == ()


def test_largest_accepted_value_stays_finite_where_it_is_used() -> None:
    for key, option in NUMERIC.items():
        if option.kind != "float":
            continue
        bound = option.maximum if option.maximum is not None else option.below
        assert bound is not None, f"{key} has no upper bound"
        largest = float(bound)
        assert largest * largest < 3.4e38, f"the square of {key} overflows in single precision"
        assert largest <= max(LARGEST_NUMBER, 10**15, *LARGEST_OF_UNIT.values()), key
        if option.unit == "s":
            assert timedelta(seconds=largest) <= timedelta(seconds=LONGEST_S), key
        if option.unit in ("s", "GB"):
            assert int(largest * 1e9) < 2**63, key


@pytest.mark.slow(kept=["diagnostics", "evaluation", "fp8", "profile", "checkpoint", "email"])
@pytest.mark.parametrize("section", sorted(all_options()))
def test_dry_run_survives_all_bounds_of_a_section(section: str) -> None:
    """Sizes of the model, the batch and the layout are left out, because a plan computes with them."""
    config = make_config()
    values: dict[str, Any] = {}
    for name, option in all_options()[section].items():
        is_number = option.kind in ("int", "float") and not option.choices
        if is_number and option.maximum is not None and section not in ("model", "batch", "parallel"):
            values[name] = option.maximum if option.kind == "int" else float(option.maximum)
    changed = replace(config, **{section: replace(getattr(config, section), **values)})
    problems = check(changed, {}, 1)
    assert problems or plan_run(changed).stages
