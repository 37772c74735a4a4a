"""Fixtures for the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The one pool of rank processes that all distributed tests share. Processes start when first needed."""
    with RankPool(size=8) as pool:
        yield pool
