"""Checks outside of the loader: for training, and of a configuration that a program created."""

from __future__ import annotations

from pathlib import Path

from megatrain.config import load_config
from megatrain.config.checks import check
from tests.unit.config.conftest import ProblemsOf


def test_training_needs_data(problems_of: ProblemsOf) -> None:
    expected = (
        'data.train="" must name the training tokens; set it to the path of a .bin and .idx pair without the suffix '
        "(`megatrain data build` makes one), or name several with [[data_source]] (default)"
    )

    assert problems_of(is_for_training=True) == (expected,)
    assert problems_of("--data.train=tokens", is_for_training=True) == ()


def test_configuration_from_a_program_is_checked_without_places(small: Path) -> None:
    loaded = load_config(small)
    tables = loaded.config.to_dict()
    tables["parallel"]["tp_size"] = 0
    tables["model"]["window_size"] = 100

    assert check(loaded.config, {}, world_size=1) == []
    assert check(type(loaded.config).from_dict(tables), {}, world_size=1) == [
        "parallel.tp_size=0 is out of range; use a value >= 1 and <= 10000000",
        "model.window_size=100 must be at most model.seq_len=64; use 64 or less, or 0 for no window",
    ]
