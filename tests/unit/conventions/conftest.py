"""Shared set-up of the convention tests: no garbage collection while there are syntax trees of all sources."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.helpers.source_tree import forget_trees


def pytest_runtest_setup() -> None:
    """Disable the garbage collector: a single collection would traverse millions of nodes, none of which is garbage."""
    gc.disable()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Release all syntax trees after the last test that reads them, and enable the garbage collector again."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        forget_trees()
        gc.enable()
