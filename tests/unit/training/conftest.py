"""Trainers without peers, closed when their test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.single_rank_trainer import SingleRankTrainer, single_rank_trainer, small_config


@pytest.fixture
def make_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SingleRankTrainer]]:
    """Return a function that creates a trainer of the small configuration, changed by tables."""
    made: list[SingleRankTrainer] = []

    def make(*changes: dict[str, dict[str, Any]]) -> SingleRankTrainer:
        directory = tmp_path / f"data-{len(made)}"
        made.append(single_rank_trainer(small_config(directory, *changes), monkeypatch))
        return made[-1]

    yield make
    for one in made:
        one.close()
