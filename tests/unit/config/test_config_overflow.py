"""Numbers that overflow where they are used: each numeric key refuses them; at its bounds a dry run survives."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from megatrain.config.checks import check
from megatrain.config.config import all_options
from megatrain.config.load import load_config
from megatrain.config.options import LARGEST_NUMBER, LARGEST_OF_UNIT, LONGEST_S, Option
from megatrain.contracts.errors import ConfigError
from megatrain.planning.run_plan import plan_run
from tests.helpers.source_tree import ROOT
from tests.helpers.training_case import make_config

SMALL = ROOT / "configs" / "demo.toml"
NUMERIC = [
    (f"{section}.{name}", option)
    for section, options in all_options().items()
    for name, option in options.items()
    if option.kind in ("int", "float", "list of int") and not option.choices
]
FLOATS = ["1e300", "1e38", "3.5e38", "-1e300", "1e-300", "1e-400", "-1e-400", "inf", "nan", str(10**400)]
INTEGERS = [str(2**63), str(2**62), str(-(2**63)), str(10**400)]


def refusal(key: str, value: str) -> str | None:
    """Return what the checks say of a value, None where they take it."""
    written = f"[{value}]" if dict(NUMERIC)[key].kind == "list of int" else value
    try:
        load_config(SMALL, [f"--{key}={written}"])
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("key", "option"), NUMERIC, ids=[key for key, _ in NUMERIC])
def test_absurd_numbers_are_refused_with_key_rule_and_hint(key: str, option: Option) -> None:
    for value in FLOATS if option.kind == "float" else INTEGERS:
        message = refusal(key, value)
        assert message is not None, f"--{key}={value} is taken"
        assert key in message
        assert "use " in message, message


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("optimizer.lr", "1e38", "optimizer.lr=1e+38 is out of range; use a value > 0 and <= 1000"),
        ("optimizer.eps", "1e-46", "optimizer.eps=1e-46 is too close to 0; use a value of at least 1e-30"),
        ("train.z_loss", "1e-300", "train.z_loss=1e-300 is too close to 0; use a value of at least 1e-30, or 0"),
        (
            "train.z_loss",
            "1_0.0E-400",
            "train.z_loss=1_0.0E-400 is too close to 0; use a value of at least 1e-30, or 0",
        ),
        ("optimizer.lr", "1e-400", "optimizer.lr=1e-400 is out of range; use a value > 0 and <= 1000"),
        ("train.steps", "1e-400", "train.steps=1e-400 must be an integer"),
        ("recovery.join_timeout_s", "1e300", "use a value > 0 and <= 1000000000"),
        ("recovery.hang_floor_s", "1e-9", "is too close to 0; use a value of at least 0.001"),
        ("diagnostics.retention_gb", "1e12", "use a value > 0 and <= 1000000000"),
        ("diagnostics.spool_mb", str(10**13), "use a value >= 1 and <= 1000000000000"),
        ("train.steps", str(2**31), "use a value >= 1 and <= 2147483647"),
    ],
)
def test_the_rule_names_the_bound(key: str, value: str, rule: str) -> None:
    assert rule in (refusal(key, value) or "")


@pytest.mark.parametrize("zero", ["0.0", "0e-400", "0.0E-4", "-0.0e5", "0"])
def test_zero_is_not_close_to_0(zero: str) -> None:
    assert refusal("train.z_loss", zero) is None


@pytest.mark.parametrize(
    ("key", "option"),
    [(key, option) for key, option in NUMERIC if option.kind == "float"],
    ids=[key for key, option in NUMERIC if option.kind == "float"],
)
def test_largest_accepted_value_stays_finite_where_it_is_used(key: str, option: Option) -> None:
    bound = option.maximum if option.maximum is not None else option.below
    assert bound is not None, f"{key} has no upper bound"
    largest = float(bound)
    assert largest * largest < 3.4e38, "its square overflows in single precision"
    assert largest <= max(LARGEST_NUMBER, 10**15, *LARGEST_OF_UNIT.values())
    if option.unit == "s":
        assert timedelta(seconds=largest) <= timedelta(seconds=LONGEST_S)
        assert int(largest * 1e9) < 2**63
    if option.unit == "GB":
        assert int(largest * 1e9) < 2**63


@pytest.mark.slow(kept=["diagnostics", "evaluation", "fp8", "profile", "checkpoint", "email"])
@pytest.mark.parametrize("section", sorted(all_options()))
def test_a_dry_run_survives_all_bounds_of_a_section(section: str) -> None:
    """But for sizes of the model, the batch and the layout, which a plan computes with."""
    config = make_config()
    values: dict[str, Any] = {}
    for name, option in all_options()[section].items():
        is_number = option.kind in ("int", "float") and not option.choices
        if is_number and option.maximum is not None and section not in ("model", "batch", "parallel"):
            values[name] = option.maximum if option.kind == "int" else float(option.maximum)
    changed = replace(config, **{section: replace(getattr(config, section), **values)})
    problems = check(changed, {}, 1)
    assert problems or plan_run(changed).stages
