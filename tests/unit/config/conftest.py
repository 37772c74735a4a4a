"""A small valid configuration that the tests bend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.config import load_config
from megatrain.contracts.errors import ConfigError

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


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path, relative to the working directory, of a valid file."""
    monkeypatch.chdir(tmp_path)
    path = Path("small.toml")
    path.write_text(SMALL)
    return path


@pytest.fixture
def problems_of(small: Path) -> ProblemsOf:
    """Return a function that gives the problems of the small file, or of another text, with overrides."""

    def problems(*overrides: str, text: str | None = None, **options: object) -> tuple[str, ...]:
        if text is not None:
            small.write_text(text)
        try:
            load_config(small, overrides, **options)
        except ConfigError as error:
            return error.problems
        return ()

    return problems
