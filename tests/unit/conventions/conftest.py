"""Shared set-up of the convention tests: no garbage collection while they parse the sources."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.source_tree import forget_trees


@pytest.fixture(autouse=True)
def nothing_is_garbage() -> Iterator[None]:
    """Disable the garbage collector while the syntax trees of all files are built and read."""
    gc.disable()
    yield
    gc.enable()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Let go of all syntax trees after the last test that reads them: later garbage collections would walk them."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        forget_trees()
