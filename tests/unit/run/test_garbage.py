"""Planned garbage collection: cycles live until the planned step, and Python's collector comes back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from megatrain.garbage import PlannedGarbageCollection
from tests.helpers.lone_rank import SilentRecorder


class Node:
    """An object in a cycle with itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _restored_collector() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_a_cycle_lives_until_the_planned_step() -> None:
    with PlannedGarbageCollection(3, SilentRecorder()) as planned:
        assert not gc.isenabled()
        alive = weakref.ref(Node())
        planned.after_step(2)
        assert alive() is not None
        planned.after_step(3)
        assert alive() is None
    assert gc.isenabled()


def test_interval_zero_leaves_the_collector_alone() -> None:
    with PlannedGarbageCollection(0, SilentRecorder()) as planned:
        assert gc.isenabled()
        alive = weakref.ref(Node())
        planned.after_step(100)
        assert alive() is not None
    gc.collect()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with PlannedGarbageCollection(5, SilentRecorder()):
        pass
    assert not gc.isenabled()
