"""Spans as a reader sees them: open, ended, nested, asynchronous, failed, overwritten, sampled, switched off."""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Callable

import pytest

from megatrain.contracts.black_box.operations import Operation, StepValue
from megatrain.contracts.black_box.reader import write_control
from megatrain.contracts.black_box.values import ControlPage, Phase, RecordFlag, State
from megatrain.contracts.errors import DataError
from megatrain.fencing.phase_timeouts import PhaseTimeouts
from megatrain.telemetry.recorder import Recorder, open_recorder
from tests.helpers.waiting import DEADLINE_S
from tests.unit.telemetry.conftest import IDENTITY, Boxed

Boxes = Callable[..., Boxed]
FORWARD = Operation.FORWARD_COMPUTE


def test_a_span_is_on_record_from_its_beginning(boxed: Boxes) -> None:
    box = boxed()
    box.recorder.set_step(7)
    before = time.monotonic_ns()
    with box.recorder.span(FORWARD, microbatch=3, chunk=1, num_bytes=99):
        (record,) = box.read().in_flight
        assert (record.operation, record.step, record.microbatch, record.chunk) == ("forward-compute", 7, 3, 1)
        assert (record.num_bytes, record.group, record.collective_sequence, record.flags) == (99, 0, 0, 0)
    after = time.monotonic_ns()
    (record,) = box.read().records
    assert record.duration_ns is not None
    assert before <= record.start_ns == record.launch_ns <= record.start_ns + record.duration_ns <= after


def test_nested_and_asynchronous_spans_end_in_any_order(boxed: Boxes) -> None:
    box = boxed()
    recorder = box.recorder
    first, second = recorder.begin(Operation.PARAMS_ALL_GATHER), recorder.begin(Operation.GRADS_REDUCE_SCATTER)
    with recorder.span(FORWARD), recorder.span(Operation.TP_ALL_GATHER):
        recorder.end(first)
        names = [record.operation for record in box.read().in_flight]
    assert names == ["grads-reduce-scatter", "forward-compute", "tp-all-gather"]
    recorder.end(second)
    recorder.end(second)
    recorder.end(0)
    recorder.end(12345)
    assert box.read().in_flight == ()
    assert [record.sequence for record in box.read().records] == [1, 2, 3, 4]


def test_a_span_left_by_an_exception_is_marked(boxed: Boxes) -> None:
    box = boxed()

    def fail() -> None:
        with box.recorder.span(FORWARD):
            raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        fail()
    (record,) = box.read().records
    assert record.flags == RecordFlag.FAILED
    assert not record.is_in_flight


def test_ring_keeps_the_newest_records(boxed: Boxes) -> None:
    box = boxed(num_records=16)
    recorder = box.recorder
    recorder.set_step(1)
    token = recorder.begin(Operation.CHECKPOINT)
    for microbatch in range(40):
        with recorder.span(FORWARD, microbatch=microbatch):
            pass
    recorder.end(token)
    found = box.read()
    assert [record.microbatch for record in found.records] == list(range(24, 40))
    assert found.num_torn == 0
    assert found.progress.num_lost_ends == 1
    # Its time is still part of the totals.
    assert recorder.complete_step().totals[Operation.CHECKPOINT].count == 1


def test_record_of_a_killed_writer_is_torn_not_mixed(boxed: Boxes) -> None:
    box = boxed(num_records=16)
    recorder = box.recorder
    for microbatch in range(20):
        with recorder.span(FORWARD, microbatch=microbatch):
            pass

    def die(buffer: bytearray, offset: int, *_: int) -> None:
        buffer[offset : offset + 24] = b"\1" * 24
        raise SystemExit

    recorder._pack = die
    with pytest.raises(SystemExit):
        recorder.begin(FORWARD)
    found = box.read()
    assert found.num_torn == 1
    assert [record.sequence for record in found.records] == list(range(6, 21))
    assert found.cursor == 21


def test_progress_of_steps_and_phases(boxed: Boxes) -> None:
    box = boxed()
    recorder = box.recorder
    progress = box.read().progress
    assert progress.phase is Phase.INIT
    assert (progress.current_step, progress.completed_step, progress.median_step_ns) == (None, None, None)
    assert recorder.step_summary() is None

    recorder.set_step(100)
    assert box.read().progress.phase is Phase.FIRST_STEP
    recorder.complete_step()
    progress = box.read().progress
    assert (progress.current_step, progress.completed_step) == (100, 100)
    assert progress.last_step_ns is not None
    assert progress.median_step_ns is None, "a first step does not count for the limit"

    for step in (101, 102, 103):
        recorder.set_step(step)
        recorder.complete_step()
    progress = box.read().progress
    assert progress.phase is Phase.STEP
    assert progress.completed_step == 103
    assert progress.completed_ns is not None
    assert progress.step_started_ns is not None
    assert progress.completed_ns - progress.step_started_ns == progress.last_step_ns
    assert progress.median_step_ns is not None
    assert progress.median_step_ns > 0

    since = progress.phase_since_ns
    recorder.set_phase(Phase.EVALUATION)
    progress = box.read().progress
    assert progress.phase is Phase.EVALUATION
    assert progress.phase_since_ns > since
    recorder.set_phase(Phase.EVALUATION)
    assert box.read().progress.phase_since_ns == progress.phase_since_ns, "the phase continues"
    recorder.set_step(104)
    assert box.read().progress.phase is Phase.STEP


def test_the_typical_step_is_the_median_of_the_last_31(boxed: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    box = boxed()
    now_ns = 0
    monkeypatch.setattr("megatrain.telemetry.recorder.monotonic_ns", lambda: now_ns)

    def run_steps(durations_ns: list[int]) -> int | None:
        nonlocal now_ns
        for duration_ns in durations_ns:
            box.recorder.set_step(0)
            now_ns += duration_ns
            box.recorder.complete_step()
        return box.read().progress.median_step_ns

    assert run_steps([1000]) is None
    assert run_steps([5] * 31) == 5
    assert run_steps([9] * 15) == 5
    assert run_steps([9]) == 9


def test_a_larger_batch_does_not_count_as_a_hang(boxed: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    box = boxed()
    now_ns = 0
    monkeypatch.setattr("megatrain.telemetry.recorder.monotonic_ns", lambda: now_ns)
    typical: list[int | None] = []
    # micro-batches of a step, and its time; the last batch is smaller, and its steps take as long per micro-batch
    for work, duration_ns in ((2, 900), (2, 10), (2, 12), (32, 170), (32, 160), (32, 180), (2, 10)):
        box.recorder.set_step(0)
        box.recorder.set_work(work)
        typical.append(box.read().progress.median_step_ns)
        now_ns += duration_ns
        box.recorder.complete_step()
    # Times with 2 micro-batches count 16 times with 32; times with 32 count unchanged.
    assert typical == [None, None, 10, 192, 170, 170, 160]
    limits = PhaseTimeouts(init_s=1.0, first_step_s=1.0, checkpoint_s=1.0, evaluation_s=1.0, floor_s=0.0, factor=10.0)
    assert limits.limit_s(box.read().progress) == pytest.approx(10 * 160e-9)


def test_ended_spans_do_not_pile_up_between_steps(boxed: Boxes) -> None:
    recorder = boxed().recorder
    for _ in range(2 * 4096):
        recorder.end(recorder.begin(FORWARD))
    assert len(recorder._totals.ended) <= 4096
    recorder.set_step(0)
    assert recorder.complete_step().totals[FORWARD].count == 2 * 4096


def test_spans_before_the_first_step_and_with_an_own_step(boxed: Boxes) -> None:
    box = boxed()
    with box.recorder.span(Operation.INIT):
        pass
    box.recorder.set_step(5)
    with box.recorder.span(Operation.DATA_WAIT, step=6):
        pass
    assert [record.step for record in box.read().records] == [-1, 6]


def test_span_of_another_process_is_in_the_step_it_ended(boxed: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    box = boxed()
    now_ns = 1000
    monkeypatch.setattr("megatrain.telemetry.recorder.monotonic_ns", lambda: now_ns)
    found = []
    # Reads that ended before the first step, in it, and in the next one, which are recorded at the beginning of a step.
    for step, begin, spans in ((7, 1000, [(900, 50)]), (8, 2000, [(1500, 400), (1990, 15)]), (9, 3000, [(2100, 7)])):
        now_ns = begin
        box.recorder.set_step(step)
        for start_ns, duration_ns in spans:
            box.recorder.record_span(Operation.DATA_READ, start_ns, duration_ns, num_bytes=3)
        summary = box.recorder.complete_step()
        found.append((summary.totals[Operation.DATA_READ].sum_ns, summary.totals[Operation.DATA_READ].num_bytes))
    assert found == [(50, 3), (415, 6), (7, 3)]
    records = [(record.step, record.start_ns, record.duration_ns) for record in box.read().records]
    assert records == [(7, 900, 50), (7, 1500, 400), (8, 1990, 15), (8, 2100, 7)]
    assert {record.operation for record in box.read().records} == {"data-read"}


def test_totals_of_a_step(boxed: Boxes) -> None:
    box = boxed()
    recorder = box.recorder
    recorder.set_step(4)
    for num_bytes in (10, 20, 30):
        with recorder.span(Operation.TP_ALL_GATHER, num_bytes=num_bytes):
            pass
    with recorder.span(Operation.DATA_WAIT):
        pass
    summary = recorder.complete_step()
    assert summary is recorder.step_summary()
    found = box.read()
    durations = [record.duration_ns or 0 for record in found.records if record.operation == "tp-all-gather"]
    gathered = summary.totals[Operation.TP_ALL_GATHER]
    assert (gathered.sum_ns, gathered.max_ns) == (sum(durations), max(durations))
    assert (gathered.count, gathered.num_bytes) == (3, 60)
    assert summary.sum_ms(Operation.TP_ALL_GATHER) == sum(durations) / 1e6
    assert summary.sum_ms(Operation.OPTIMIZER) == 0

    assert len(found.records) == 4, "totals are not spans"
    totals = {total.operation: total for total in found.totals}
    assert set(totals) == {"tp-all-gather", "data-wait"}
    row = totals["tp-all-gather"]
    assert (row.step, row.sum_ns, row.max_ns, row.count, row.num_bytes) == (4, sum(durations), max(durations), 3, 60)
    assert row.step_started_ns == summary.started_ns

    recorder.set_step(5)
    assert recorder.complete_step().totals == {}


def test_sixteen_largest_totals_are_streamed(boxed: Boxes) -> None:
    box = boxed(num_records=256)
    recorder = box.recorder
    recorder.set_step(1)
    for operation in Operation:
        with recorder.span(operation):
            pass
    summary = recorder.complete_step()
    assert set(summary.totals) == set(Operation)
    sums = [total.sum_ns for total in box.read().totals]
    assert sums == sorted((total.sum_ns for total in summary.totals.values()), reverse=True)[:16]


def test_groups_count_what_was_entered_and_left(boxed: Boxes) -> None:
    box = boxed()
    recorder = box.recorder
    tp = recorder.add_group("tp", [2, 3])
    link = recorder.add_group("pp-backward", [2, 0])
    odd = recorder.add_group("odd", [0, 1, 3])
    assert recorder.add_group("tp", range(2, 4)) == tp
    assert len({tp, link, odd, 0}) == 4
    tokens = [recorder.begin(Operation.TP_ALL_REDUCE, group=tp) for _ in range(3)]
    with recorder.span(Operation.BACKWARD_SEND, group=link):
        groups = box.read().groups
        assert (groups[tp].entered, groups[tp].left) == (3, 0)
        assert (groups[link].entered, groups[link].left) == (1, 0)
    recorder.end(tokens[1])
    recorder.end(tokens[0])
    found = box.read()
    assert (found.groups[tp].name, list(found.groups[tp].ranks)) == ("tp", [2, 3])
    assert list(found.groups[link].ranks) == [2, 0]
    assert list(found.groups[odd].ranks) == []
    assert (found.groups[tp].entered, found.groups[tp].left) == (3, 2)
    assert found.groups[link].left == 1
    assert [record.collective_sequence for record in found.records if record.group == tp] == [1, 2, 3]


def test_group_table_is_limited(boxed: Boxes) -> None:
    recorder = boxed().recorder
    for number in range(1, 64):
        assert recorder.add_group(f"g{number}", [2]) == number
    with pytest.raises(DataError, match=r"'g64' would be number 64, the table ends at 63"):
        recorder.add_group("g64", [2])


def test_values_of_a_step_are_reported_beside_its_spans(boxed: Boxes) -> None:
    box = boxed()
    recorder = box.recorder
    recorder.set_step(4)
    before = time.monotonic_ns()
    with recorder.span(FORWARD):
        pass
    recorder.complete_step()
    recorder.record_value(StepValue.LOSS, 2.5)
    recorder.record_value(StepValue.GRAD_NORM, math.inf)
    (all_ones,) = struct.unpack("<d", b"\xff" * 8)  # a NaN whose bits would mark the record as open
    recorder.record_value(StepValue.TOKENS, all_ones)
    found = box.read()
    assert [(value.sequence, value.step, value.kind_number) for value in found.values] == [
        (3, 4, 1),
        (4, 4, 2),
        (5, 4, 3),
    ]
    assert [value.value for value in found.values[:2]] == [2.5, math.inf]
    assert math.isnan(found.values[2].value)
    assert all(before <= value.at_ns <= time.monotonic_ns() for value in found.values)
    assert [record.operation for record in found.records] == ["forward-compute"], "a value is not a span"
    assert found.in_flight == ()
    write_control(box.path, ControlPage(span_mask=0))
    recorder.set_step(5)
    recorder.record_value(StepValue.LOSS, 2.5)
    assert len(box.read().values) == 3


def test_garbage_collection_during_a_sum_is_counted_later(boxed: Boxes) -> None:
    """The collector may interrupt the code that sums spans: its own span then ends there, and must not wait."""
    recorder = boxed().recorder
    recorder.set_step(0)
    with recorder._totals._lock:
        for _ in range(4096):
            recorder.end(recorder.begin(Operation.GC))
    assert recorder.complete_step().totals[Operation.GC].count == 4096


@pytest.mark.parametrize("has_box", [True, False])
def test_threads_record_concurrently(boxed: Boxes, has_box: bool) -> None:
    num_threads, num_spans = 4, 3000
    recorder: Recorder
    if has_box:
        box = boxed(num_records=num_threads * num_spans)
        recorder = box.recorder
    else:
        recorder = open_recorder(IDENTITY, directory="", run_key="", num_records=256)
    recorder.set_step(1)
    start = threading.Barrier(num_threads)

    def record(number: int) -> None:
        start.wait(timeout=DEADLINE_S)
        for microbatch in range(num_spans):
            with recorder.span(FORWARD, chunk=number, microbatch=microbatch, num_bytes=1):
                pass

    threads = [threading.Thread(target=record, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=DEADLINE_S)
    totals = recorder.complete_step().totals[FORWARD]
    assert (totals.count, totals.num_bytes) == (num_threads * num_spans,) * 2
    if has_box:
        found = box.read()
        assert found.num_torn == 0
        kept = [record for record in found.records if record.operation == "forward-compute"]
        # One total was written after them, over the oldest.
        assert len(kept) == num_threads * num_spans - 1
        assert all(not record.is_in_flight for record in kept)
        for number in range(num_threads):
            microbatches = [record.microbatch for record in kept if record.chunk == number]
            assert microbatches == sorted(microbatches)


def test_without_a_black_box_spans_are_still_summed() -> None:
    recorder = open_recorder(IDENTITY, directory="", run_key="", num_records=256)
    recorder.add_group("tp", [2, 3])
    recorder.set_step(1)
    for _ in range(10_000):  # more than the allocated buffer holds at once
        with recorder.span(FORWARD):
            pass
    assert recorder.complete_step().totals[FORWARD].count == 10_000
    recorder.close()


def test_a_clean_end_removes_the_file_and_late_spans_do_no_harm(boxed: Boxes) -> None:
    box = boxed()
    token = box.recorder.begin(FORWARD)
    box.recorder.close()
    assert not box.path.exists()
    box.recorder.end(token)
    with box.recorder.span(FORWARD):
        pass
    box.recorder.close()


def test_black_box_is_kept_on_request(boxed: Boxes) -> None:
    failed = boxed()
    failed.recorder.begin(Operation.TP_ALL_REDUCE)
    failed.recorder.close(keep=True, has_failed=True)
    found = failed.read()
    assert found.state is State.FAILED
    assert found.ended_ns is not None
    assert [record.operation for record in found.in_flight] == ["tp-all-reduce"]
    ended_well = boxed()
    with ended_well.recorder.span(Operation.GC):
        pass
    ended_well.recorder.close(keep=True)
    with ended_well.recorder.span(Operation.GC):
        pass
    assert ended_well.read().state is State.CLOSED
    assert len(ended_well.read().records) == 1, "nothing is recorded after the end"
