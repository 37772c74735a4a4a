"""Keys in the etcd that all tests share, and the rule that no thread outlives its test."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest

_numbers = itertools.count()


@pytest.fixture
def prefix() -> str:
    """Keys that no other test uses."""
    return f"test-{next(_numbers)}/"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith(("etcd ", "proxy"))]
    assert not left
