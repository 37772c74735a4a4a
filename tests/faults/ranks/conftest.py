"""Fixtures of the tests that break ranks: their jobs have several on each host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.job_under_launch import WORKERS
from tests.helpers.undisturbed_run import undisturbed_losses_of


@pytest.fixture(scope="session")
def undisturbed_losses(tmp_path_factory: pytest.TempPathFactory, shared_directory: Path) -> dict[int, float]:
    """The losses of the launched job without a fault, with the same number of ranks."""
    return undisturbed_losses_of(WORKERS, tmp_path_factory.mktemp("undisturbed"), shared_directory)
