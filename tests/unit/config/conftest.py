"""A small valid configuration that the tests modify."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from megatrain.config.load import load_config
from megatrain.contracts.errors import ConfigError
from tests.helpers.notification_topics import config_with

SMALL = """\
[model]
vocab_size = 1000
seq_len = 64
hidden_size = 160
num_layers = 8
num_heads = 20

[batch]
global_batch_size = 48

[train]
steps = 100

[optimizer]
lr = 1e-3
"""

ProblemsOf = Callable[..., tuple[str, ...]]
Rules = Mapping[str, tuple[Sequence[str], str | None]]
"""Name of a case -> overrides, and the whole message of the resulting problem, or None."""


def assert_rules(problems_of: ProblemsOf, rules: Rules) -> None:
    """Check that each case has exactly the problem that it names."""
    found = {name: problems_of(*overrides) for name, (overrides, _) in rules.items()}
    assert found == {name: () if problem is None else (problem,) for name, (_, problem) in rules.items()}


def assert_refused(directory: Path, problems: Mapping[str, str]) -> None:
    """Check that each text of sections has one problem, which matches its pattern and names the line."""
    for sections, pattern in problems.items():
        with pytest.raises(ConfigError) as caught:
            raise AssertionError(f"accepted: {config_with(directory, sections)}\n{sections}")
        (found,) = caught.value.problems
        assert re.search(pattern, found), sections
        assert "config.toml:" in found, sections


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path, relative to the working directory, of a valid file."""
    monkeypatch.chdir(tmp_path)
    path = Path("small.toml")
    path.write_text(SMALL)
    return path


@pytest.fixture
def problems_of(small: Path) -> ProblemsOf:
    """Return a function that returns the problems of the small file, or of another text, with overrides."""

    def problems(*overrides: str, text: str | None = None, **options: object) -> tuple[str, ...]:
        if text is not None:
            small.write_text(text)
        try:
            load_config(small, overrides, **options)
        except ConfigError as error:
            return error.problems
        return ()

    return problems
