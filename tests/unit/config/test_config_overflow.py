"""Numbers that overflow where they are used, and huge numbers, are refused by name; a dry run accepts the bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from megatrain.config.checks import check
from megatrain.config.load import load_config
from megatrain.config.options import LARGEST_NUMBER, LARGEST_OF_UNIT, LONGEST_S
from megatrain.config.sections import all_options
from megatrain.contracts.errors import ConfigError
from megatrain.planning.run_plan import plan_run
from tests.helpers.source_tree import ROOT
from tests.helpers.training_case import make_config
from tests.unit.config.conftest import ProblemsOf

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


def test_numbers_beyond_what_python_reads_are_refused(problems_of: ProblemsOf) -> None:
    for setting, rule in [
        ("optimizer.eps=1" + 400 * "0", "is too large; use a number below 1e308"),
        ("train.steps=0x1" + 9000 * "0", f"is too large; use a value of at most {2**31 - 1}"),
        # Python refuses this many digits or brackets, so these values are read as text.
        ("train.steps=1" + 5000 * "0", "must be an integer, such as 8, not a string"),
        ("profile.ranks=" + 3000 * "[", "must be a list of integers, such as [0, 8], not a string"),
    ]:
        (problem,) = problems_of(f"--{setting}")
        assert problem.endswith(f"... {rule} (--{setting.partition('=')[0]} on the command line)")


def test_a_file_beyond_what_python_reads_is_refused(problems_of: ProblemsOf) -> None:
    for value in ("1" + 5000 * "0", 3000 * "[" + 3000 * "]"):
        (problem,) = problems_of(text=f"[train]\nsteps = {value}\n")
        assert problem.startswith("cannot be read as TOML: ")
        assert problem.endswith("write shorter numbers and fewer brackets (small.toml)")


def test_the_largest_sizes_are_checked_at_once(problems_of: ProblemsOf) -> None:
    huge = ["--parallel.pp_size=9999999", "--parallel.num_chunks=9999999", "--parallel.schedule=interleaved"]
    sizes = ["--model.seq_len=10000000000", "--model.num_heads=999983", "--model.num_kv_heads=999979"]
    rampup = ["--batch.rampup_start=1", "--batch.rampup_increment=1", f"--batch.rampup_samples={2**53}"]
    problems = problems_of(*huge, *sizes, *rampup, "--batch.global_batch_size=100000000")
    assert [problem.partition("=")[0] for problem in problems] == [
        "model.num_kv_heads",
        "model.num_heads",
        "model.num_layers",
        "batch.global_batch_size",
    ]
