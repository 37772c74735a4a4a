"""The prefetcher: order, bounded readahead, errors in the consumer, and no remaining thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest

from megatrain.contracts.errors import MegatrainError
from megatrain.contracts.step_plan import StepPlan
from megatrain.data.prefetch import Prefetcher
from megatrain.data.step_batch import StepBatch
from tests.helpers.step_plans import step_plan
from tests.helpers.thread_starts import no_thread_starts
from tests.helpers.waiting import DEADLINE_S


def batch(plan: StepPlan) -> StepBatch:
    return StepBatch(plan.cursor, plan.global_batch_size, [])


def plans() -> Iterator[StepPlan]:
    """A ramp-up: 2, 4, 6, 8, 8, ... samples a step."""
    cursor, size = 0, 2
    while True:
        yield step_plan(cursor, size)
        cursor, size = cursor + size, min(size + 2, 8)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "data-prefetch"]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_steps_come_in_the_order_of_the_plan(prefetch: int) -> None:
    with Prefetcher(batch, plans(), prefetch) as prefetcher:
        steps = [prefetcher.next() for _ in range(6)]
    assert [(step.cursor, step.global_batch_size) for step in steps] == [
        (0, 2),
        (2, 4),
        (6, 6),
        (12, 8),
        (20, 8),
        (28, 8),
    ]


def test_the_thread_reads_ahead_and_then_waits() -> None:
    read: list[int] = []
    has_read_three = threading.Event()

    def read_step(plan: StepPlan) -> StepBatch:
        read.append(plan.cursor)
        if len(read) == 3:
            has_read_three.set()
        return batch(plan)

    with Prefetcher(read_step, plans(), prefetch=2) as prefetcher:
        # Two in the queue and one that waits for space in it: the thread cannot read a fourth before `next`.
        assert has_read_three.wait(DEADLINE_S)
        assert read == [0, 2, 6]
        assert prefetcher.next().cursor == 0
    assert len(read) <= 4


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_is_raised_at_its_step(prefetch: int) -> None:
    def read_step(plan: StepPlan) -> StepBatch:
        if plan.cursor == 6:
            raise ValueError("damaged at 6")
        return batch(plan)

    with Prefetcher(read_step, plans(), prefetch) as prefetcher:
        assert [prefetcher.next().cursor for _ in range(2)] == [0, 2]
        with pytest.raises(ValueError, match="damaged at 6"):
            prefetcher.next()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_end_of_the_plan_is_reported(prefetch: int) -> None:
    with Prefetcher(batch, [step_plan(0, 4)], prefetch) as prefetcher:
        assert prefetcher.next().cursor == 0
        with pytest.raises(StopIteration):
            prefetcher.next()


def test_rank_that_waits_shows_it_until_the_step_is_there() -> None:
    has_shown = threading.Event()

    def slow(plan: StepPlan) -> StepBatch:
        assert has_shown.wait(DEADLINE_S)
        return batch(plan)

    with Prefetcher(slow, plans(), 1) as prefetcher:
        assert prefetcher.next(has_shown.set).cursor == 0


def test_close_wakes_waiting_producer_and_consumer() -> None:
    is_reading, may_return = threading.Event(), threading.Event()

    def slow(plan: StepPlan) -> StepBatch:
        is_reading.set()
        assert may_return.wait(DEADLINE_S)
        return batch(plan)

    prefetcher = Prefetcher(slow, plans(), 1)
    assert is_reading.wait(DEADLINE_S)
    errors: list[BaseException] = []

    def consume() -> None:
        try:
            prefetcher.next()
        except RuntimeError as error:
            errors.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    closer = threading.Thread(target=prefetcher.close)
    closer.start()
    consumer.join(DEADLINE_S)
    assert not consumer.is_alive()
    may_return.set()
    closer.join(DEADLINE_S)
    assert not closer.is_alive()
    assert [str(error) for error in errors] == ["the prefetcher is closed"]
    prefetcher.close()
    with pytest.raises(RuntimeError, match="closed"):
        prefetcher.next()


def reader_thread() -> threading.Thread:
    (thread,) = [one for one in threading.enumerate() if one.name == "data-prefetch"]
    return thread


def test_closed_prefetcher_without_a_thread_refuses_steps() -> None:
    prefetcher = Prefetcher(batch, plans(), 0)
    prefetcher.close()
    with pytest.raises(RuntimeError, match="closed"):
        prefetcher.next()


def test_reader_stops_at_an_error_and_keeps_raising_it() -> None:
    num_reads = 0

    def fail(plan: StepPlan) -> StepBatch:
        nonlocal num_reads
        num_reads += 1
        raise ValueError("damaged")

    errors: list[BaseException] = []

    def consume() -> None:
        for _ in range(2):
            try:
                prefetcher.next()
            except (ValueError, RuntimeError) as error:
                errors.append(error)

    with Prefetcher(fail, plans(), 3) as prefetcher:
        consumer = threading.Thread(target=consume)
        consumer.start()
        consumer.join(DEADLINE_S)
        assert not consumer.is_alive()
        assert [str(error) for error in errors] == ["damaged", "damaged"]
    assert num_reads == 1


def test_closing_frees_the_blocks_that_were_read() -> None:
    held: list[weakref.ref[Marker]] = []
    has_read_three = threading.Event()

    def read_step(plan: StepPlan) -> StepBatch:
        marker = Marker()
        held.append(weakref.ref(marker))
        if len(held) == 3:
            has_read_three.set()
        return StepBatch(plan.cursor, plan.global_batch_size, [marker])

    prefetcher = Prefetcher(read_step, plans(), 2)
    assert has_read_three.wait(DEADLINE_S)
    prefetcher.close()
    assert [one() for one in held] == [None] * 3


class Marker:
    """Replaces a micro-batch to observe when it is freed."""


def test_read_that_does_not_return_is_abandoned_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    is_reading, may_return = threading.Event(), threading.Event()

    def hang(plan: StepPlan) -> StepBatch:
        is_reading.set()
        assert may_return.wait(DEADLINE_S)
        return batch(plan)

    prefetcher = Prefetcher(hang, plans(), 1)
    try:
        thread = reader_thread()
        assert thread.daemon, "it must not keep the process alive"
        assert is_reading.wait(DEADLINE_S)
        prefetcher.close(timeout_s=0.0)
        assert [record.message for record in caplog.records] == [
            "a data read has not returned for 0 s; its thread is abandoned"
        ]
    finally:
        may_return.set()
        caplog.clear()
        prefetcher.close()
    assert not thread.is_alive()
    assert not caplog.records


def test_thread_that_cannot_start_is_reported_with_a_way_out() -> None:
    text = "^the thread that reads the next steps could not be started: can't start new thread .*; data.prefetch=0 "
    with no_thread_starts(), pytest.raises(MegatrainError, match=text):
        Prefetcher(batch, plans(), 2)
