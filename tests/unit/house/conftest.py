"""What the tests of the house's rules leave behind: nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.source_tree import forget_trees


@pytest.fixture(autouse=True)
def nothing_is_garbage() -> Iterator[None]:
    """Let the collector be while the trees of all files are made and read."""
    gc.disable()
    yield
    gc.enable()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Let go of all syntax trees after the last test that reads them: later garbage collections would walk them."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        forget_trees()
