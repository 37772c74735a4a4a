"""Planned garbage collection: cycles live until the planned step, and Python's collector is restored."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from megatrain.contracts.black_box.operations import Operation
from megatrain.training.observers.garbage_collection import PlannedGarbageCollection
from tests.helpers.completed_steps import completed_step
from tests.helpers.single_rank import SilentRecorder


class CyclicNode:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.me = self


class GarbageRecorder(SilentRecorder):
    """Records the requested spans."""

    def __init__(self) -> None:
        self.spans: list[Operation] = []
        self.ended: list[int] = []

    def begin(self, operation: Operation, *place: int | None) -> int:
        self.spans.append(operation)
        return len(self.spans)

    def end(self, token: int, has_failed: bool = False) -> None:
        self.ended.append(token)


@pytest.fixture(autouse=True)
def _restored_collector() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_a_cycle_lives_until_the_planned_step() -> None:
    with PlannedGarbageCollection(3, SilentRecorder()) as planned:
        assert not gc.isenabled()
        alive = weakref.ref(CyclicNode())
        planned.after_step(completed_step(1))
        assert alive() is not None
        planned.after_step(completed_step(2))
        assert alive() is None
    assert gc.isenabled()


@pytest.mark.slow
def test_earlier_objects_are_collected_once_and_frozen() -> None:
    gc.disable()  # Otherwise Python's own collector might run first.
    alive = weakref.ref(CyclicNode())
    gc.unfreeze()
    with PlannedGarbageCollection(3, SilentRecorder()):
        assert alive() is None
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_a_collection_is_a_span() -> None:
    recorder = GarbageRecorder()
    with PlannedGarbageCollection(2, recorder) as planned:
        for index in range(5):
            planned.after_step(completed_step(index))
    assert recorder.spans == [Operation.GC, Operation.GC]
    assert recorder.ended == [1, 2]


@pytest.mark.slow
def test_unplanned_full_collection_is_a_span_too() -> None:
    recorder = GarbageRecorder()
    with PlannedGarbageCollection(0, recorder):
        gc.collect(0)  # A collection of young objects: Python does that all the time.
        gc.collect(1)
        assert recorder.spans == []
        gc.collect()
    gc.collect()
    assert (recorder.spans, recorder.ended) == ([Operation.GC], [1])


@pytest.mark.slow
def test_interval_zero_leaves_the_collector_alone() -> None:
    with PlannedGarbageCollection(0, SilentRecorder()) as planned:
        assert gc.isenabled()
        alive = weakref.ref(CyclicNode())
        planned.after_step(completed_step(99))
        assert alive() is not None
    gc.collect()


@pytest.mark.slow
def test_a_disabled_collector_stays_disabled() -> None:
    gc.disable()
    with PlannedGarbageCollection(5, SilentRecorder()):
        pass
    assert not gc.isenabled()
