"""Following the ring of a black box: each record once, when it has ended, while and after the rank writes."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from megatrain.contracts.black_box.encoding import RECORD as RECORD_STRUCT
from megatrain.contracts.black_box.encoding import RECORD_FIELDS, RING_OFFSET, Word
from megatrain.contracts.black_box.operations import OF_PRODUCERS, Operation, StepValue
from megatrain.contracts.black_box.reader import BlackBoxReader, write_control
from megatrain.contracts.black_box.values import ClockBase, ControlPage, Identity
from megatrain.contracts.errors import DataError
from megatrain.contracts.layout import Layout
from megatrain.run_files.run_directory import black_box_path
from megatrain.telemetry.recorder import Recorder, open_recorder
from megatrain_diagnostics.events.tables import Groups, Ranks, Spans, StepTotals, Values, joined
from megatrain_diagnostics.metrics.readings import ProducerReading
from megatrain_diagnostics.streamer.host_reading import rank_reading
from megatrain_diagnostics.streamer.rank_tail import HostClock, RankTail
from megatrain_diagnostics.streamer.ring_tail import RECORD, RingPoll, RingTail
from tests.helpers.black_box_layout import field_offsets

FORWARD = Operation.FORWARD_COMPUTE
CLOCK = HostClock(ClockBase(monotonic_ns=1_000, unix_ns=1_700_000_000_000_000_000, error_ns=1))
OpenBox = Callable[..., tuple[Recorder, Path]]


@pytest.fixture
def open_box(tmp_path: Path) -> Iterator[OpenBox]:
    """Return a function that opens a rank's recorder and its box."""
    opened: list[Recorder] = []

    def make(num_records: int = 64, rank: int = 2, round_number: int = 5) -> tuple[Recorder, Path]:
        identity = Identity("demo", "main", round_number, rank, Layout(tp_size=2, pp_size=2), os.getpid(), "host-1")
        opened.append(open_recorder(identity, directory=str(tmp_path), run_key="key", num_records=num_records))
        return opened[-1], black_box_path(tmp_path, "demo", "key", "main", round_number, rank)

    yield make
    for recorder in opened:
        recorder.close()


def poll(tail: RingTail) -> RingPoll:
    return tail.poll(tail._reader.cursor())


def numbers(tail: RingTail) -> list[int]:
    return [int(number) for number in poll(tail).ended["sequence"]]


def test_record_array_has_the_layout_of_the_contract() -> None:
    assert RECORD.fields is not None
    expected = field_offsets(RECORD_STRUCT, RECORD_FIELDS)
    assert {name: place[1] for name, place in RECORD.fields.items()} == {
        name: offset for name, (offset, _) in expected.items()
    }
    codes = {name: np.dtype(f"<{code}") for name, (_, code) in expected.items()}
    assert {name: place[0] for name, place in RECORD.fields.items()} == codes


def test_each_record_is_returned_once_after_its_end(open_box: OpenBox) -> None:
    recorder, path = open_box()
    with BlackBoxReader(path) as reader:
        tail = RingTail(reader)
        assert numbers(tail) == []
        long = recorder.begin(Operation.STEP)
        with recorder.span(FORWARD):
            other = recorder.begin(Operation.GRADS_REDUCE_SCATTER)
        assert numbers(tail) == [2]
        assert tail.done == 0, "a restarted streamer must read the first again"
        recorder.end(other)
        recorder.end(recorder.begin(FORWARD))
        assert numbers(tail) == [3, 4]
        recorder.end(long)
        assert numbers(tail) == [1]
        assert numbers(tail) == []
        assert tail.done == 4
        assert numbers(RingTail(reader, last=2)) == [3, 4]


def test_overwritten_records_are_counted(open_box: OpenBox) -> None:
    recorder, path = open_box(num_records=16)
    with BlackBoxReader(path) as reader:
        tail = RingTail(reader)
        hanging = recorder.begin(FORWARD)
        assert numbers(tail) == []
        for _ in range(40):
            recorder.end(recorder.begin(FORWARD))
        polled = poll(tail)
        assert [int(number) for number in polled.ended["sequence"]] == list(range(26, 42))
        assert polled.num_lost == 25, "24 unread records, and one that was open when it was overwritten"
        recorder.end(hanging)
        assert poll(tail).num_lost == 0


def test_random_reads_lose_and_repeat_no_record(open_box: OpenBox) -> None:
    recorder, path = open_box(num_records=64)
    choose = random.Random(3)
    open_tokens: list[int] = []
    num_begun, num_lost, seen = 0, 0, []
    with BlackBoxReader(path) as reader:
        tail = RingTail(reader)
        for _ in range(400):
            for _ in range(choose.randrange(12)):
                if open_tokens and choose.random() < 0.5:
                    recorder.end(open_tokens.pop(choose.randrange(len(open_tokens))))
                else:
                    open_tokens.append(recorder.begin(FORWARD))
                    num_begun += 1
            polled = poll(tail)
            num_lost += polled.num_lost
            seen += [int(number) for number in polled.ended["sequence"]]
        for token in open_tokens:
            recorder.end(token)
        polled = poll(tail)
    seen += [int(number) for number in polled.ended["sequence"]]
    assert len(seen) == len(set(seen))
    assert len(seen) + num_lost + polled.num_lost == num_begun
    assert max(seen) == num_begun


def test_a_torn_record_is_waited_for(open_box: OpenBox) -> None:
    recorder, path = open_box()
    for _ in range(3):
        recorder.end(recorder.begin(FORWARD))
    place = RING_OFFSET + 2 * 64
    with BlackBoxReader(path) as reader, path.open("r+b") as file:
        file.seek(place)
        whole = file.read(8)
        file.seek(place)
        file.write(bytes(8))
        file.flush()
        tail = RingTail(reader)
        assert numbers(tail) == [1, 3]
        file.seek(place)
        file.write(whole)
        file.flush()
        assert numbers(tail) == [2]


def test_impossible_cursor_is_an_error(open_box: OpenBox) -> None:
    _, path = open_box()
    with path.open("r+b") as file:
        file.seek(Word.CURSOR * 8)
        file.write(b"\xfe" * 8)
    with BlackBoxReader(path) as reader, pytest.raises(DataError, match=r"more than a rank can write"):
        poll(RingTail(reader))


def take_steps(recorder: Recorder, steps: range, group: int) -> None:
    for step in steps:
        recorder.set_step(step)
        with recorder.span(Operation.STEP), recorder.span(FORWARD, microbatch=1, chunk=0):
            pass
        recorder.end(recorder.begin(Operation.TP_ALL_REDUCE, num_bytes=7, group=group))
        recorder.complete_step()
        recorder.record_value(StepValue.LOSS, 0.5 * step)
        with recorder.span(Operation.GC):
            pass


def test_a_rank_becomes_rows(open_box: OpenBox) -> None:
    recorder, path = open_box(num_records=512)
    group = recorder.add_group("tp", [2, 3])
    write_control(path, ControlPage(sample_period=4))
    take_steps(recorder, range(6), group)
    tail = RankTail(path, CLOCK)
    found = dict(tail.poll())
    ranks, groups, totals, values, spans = (found[kind] for kind in (Ranks, Groups, StepTotals, Values, Spans))
    assert isinstance(ranks, Ranks)
    assert (ranks.host[0], ranks.rank[0], ranks.round[0], ranks.pp_rank[0]) == ("host-1", 2, 5, 1)
    assert isinstance(groups, Groups)
    assert (groups.name.tolist(), groups.first_rank.tolist(), groups.num_ranks.tolist()) == (["tp"], [2], [2])
    assert isinstance(totals, StepTotals)
    assert sorted(set(totals.step.tolist())) == list(range(6))
    assert set(totals.operation.tolist()) == {one.number for one in (Operation.STEP, FORWARD, Operation.TP_ALL_REDUCE,
                                                                     Operation.GC)}  # fmt: skip
    assert isinstance(values, Values)
    assert values.value.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert isinstance(spans, Spans)
    of_forward = spans.operation == FORWARD.number
    assert spans.step[of_forward].tolist() == [0, 4], "one step in four"
    assert (spans.microbatch[of_forward].tolist(), spans.chunk[of_forward].tolist()) == ([1, 1], [0, 0])
    assert spans.step[spans.operation == Operation.GC.number].tolist() == list(range(6)), "rare, so always"
    exchanges = spans.operation == Operation.TP_ALL_REDUCE.number
    assert spans.collective[exchanges].tolist() == [1, 5]
    assert spans.num_bytes[exchanges].tolist() == [7, 7]
    with BlackBoxReader(path) as reader:
        record, *_ = reader.records_since(int(spans.sequence[of_forward][0]) - 1)
    assert spans.start_ns[of_forward][0] == record.start_ns + CLOCK.offset_ns
    assert spans.duration_ns[of_forward][0] == record.duration_ns
    assert tail.poll() == []

    write_control(path, ControlPage(sample_period=1))
    take_steps(recorder, range(6, 8), group)
    found = dict(tail.poll())
    assert isinstance(found[Spans], Spans)
    assert set(found[Spans].step.tolist()) == {6, 7}, "a burst"
    assert Ranks not in found
    assert Groups not in found
    tail.close()


def test_reading_of_a_rank_has_the_work_of_its_last_step(open_box: OpenBox) -> None:
    recorder, path = open_box()
    tail = RankTail(path, CLOCK)
    tail.poll()
    assert rank_reading(tail, CLOCK).documents is None
    for step in range(3):
        recorder.set_step(step)
        for kind, value in (
            (StepValue.LABEL_TOKENS, 60.0),
            (StepValue.SQUARED_LENGTHS, 900.0),
            (StepValue.DOCUMENTS, 7.0),
            (StepValue.REPLACED_SAMPLES, 1.0),
            (StepValue.STEPS_READY, 4.0),
            (StepValue.CACHE_HIT_BYTES, 100.0),
            (StepValue.CACHE_FETCHED_BYTES, 200.0),
            (StepValue.CACHE_EVICTED_BYTES, 300.0),
            (StepValue.CACHE_NOT_STORED, 5.0),
        ):
            recorder.record_value(kind, value + step)
        recorder.record_span(Operation.DATA_READ, 0, (step + 1) * 10**9, 500 + step)
        recorder.complete_step()
    tail.poll()
    found = rank_reading(tail, CLOCK)
    assert (found.label_tokens, found.squared_lengths, found.documents) == (62.0, 902.0, 9.0)
    assert (found.replaced_samples, found.steps_ready) == (3.0, 6.0)
    assert found.cache_bytes == {"hit": 102, "fetched": 202, "evicted": 302}
    assert found.cache_not_stored == 7
    # only a rank that records the reads of the loader has their sums
    assert (found.loader_starts, found.read_s, found.read_bytes) == (None, None, None)
    recorder.record_value(StepValue.LOADER_STARTS, 2.0)
    tail.poll()
    found = rank_reading(tail, CLOCK)
    assert (found.loader_starts, found.read_s, found.read_bytes) == (2.0, 3.0, 502.0)
    tail.close()


def test_reading_of_a_rank_has_the_producers_of_its_last_step(open_box: OpenBox) -> None:
    recorder, path = open_box()
    tail = RankTail(path, CLOCK)
    for step, num_pictures in enumerate([(40.0, 8.0), (), (30.0, 18.0)]):
        recorder.set_step(step)
        recorder.record_span(FORWARD, 0, 10**9, 0)
        for number, pictures in enumerate(num_pictures):
            for kind, value in zip(OF_PRODUCERS, (pictures, 0.1 + number, 2.0, float(step)), strict=True):
                recorder.record_value(kind, value)
        if num_pictures:
            recorder.record_span(Operation.PICTURE_WAIT, 0, 5 * 10**8)
        recorder.complete_step()
        recorder.record_value(StepValue.LOSS, 1.0)
        tail.poll()
        found = rank_reading(tail, CLOCK)
        assert found.picture_wait_s == (0.5 if num_pictures else 0.0)
    assert found.producers == (ProducerReading(30.0, 0.1, 2.0, 2.0), ProducerReading(18.0, 1.1, 2.0, 2.0))
    tail.close()


def test_reading_while_a_step_is_recorded_is_complete(open_box: OpenBox) -> None:
    recorder, path = open_box()
    tail = RankTail(path, CLOCK)

    def take_step(step: int) -> None:
        recorder.set_step(step)
        for operation in (FORWARD, Operation.DATA_WAIT):
            recorder.record_span(operation, 0, (step + 1) * 10**9, 0)
        recorder.complete_step()

    take_step(0)
    recorder.record_value(StepValue.LABEL_TOKENS, 60.0)
    recorder.record_value(StepValue.DOCUMENTS, 7.0)
    tail.poll()
    take_step(1)
    last_total = 10
    with path.open("r+b") as file:
        file.seek(RING_OFFSET + last_total * 64)
        file.write(bytes(8))
        file.flush()
        tail.poll()
        before = rank_reading(tail, CLOCK)
        file.seek(RING_OFFSET + last_total * 64)
        file.write(last_total.to_bytes(8, "little"))
    recorder.record_value(StepValue.LABEL_TOKENS, 50.0)
    tail.poll()
    after = rank_reading(tail, CLOCK)
    assert [(found.compute_s, found.data_wait_s) for found in (before, after)] == [(1.0, 1.0), (2.0, 2.0)]
    assert (after.label_tokens, after.documents) == (50.0, 7.0)
    tail.close()


def test_sampled_step_includes_the_gathers_that_it_awaits(open_box: OpenBox) -> None:
    """They start after the update of the step before; those that the next step awaits are included, too."""
    recorder, path = open_box(num_records=512)
    write_control(path, ControlPage(sample_period=3))
    group = recorder.add_group("dp", [2, 3])
    for step in range(8):
        recorder.set_step(step)
        for operation in (FORWARD, Operation.GRADS_REDUCE_SCATTER, Operation.PARAMS_ALL_GATHER):
            recorder.end(recorder.begin(operation, group=0 if operation is FORWARD else group))
    tail = RankTail(path, CLOCK)
    spans = dict(tail.poll())[Spans]
    assert isinstance(spans, Spans)
    assert spans.step[spans.operation == FORWARD.number].tolist() == [0, 3, 6]
    assert spans.step[spans.operation == Operation.GRADS_REDUCE_SCATTER.number].tolist() == [0, 3, 6]
    assert spans.step[spans.operation == Operation.PARAMS_ALL_GATHER.number].tolist() == [0, 2, 3, 5, 6]
    tail.close()


def test_impossible_sample_period_costs_no_totals(open_box: OpenBox) -> None:
    recorder, path = open_box(num_records=512)
    write_control(path, ControlPage(sample_period=2**32 - 1))
    take_steps(recorder, range(3), recorder.add_group("tp", [2, 3]))
    tail = RankTail(path, CLOCK)
    found = dict(tail.poll())
    assert isinstance(found[StepTotals], StepTotals)
    assert set(found[StepTotals].step.tolist()) == {0, 1, 2}
    tail.close()


def test_evidence_holds_all_newest_spans_and_what_is_open(open_box: OpenBox) -> None:
    recorder, path = open_box(num_records=512)
    group = recorder.add_group("tp", [2, 3])
    write_control(path, ControlPage(sample_period=100))
    take_steps(recorder, range(1, 4), group)
    recorder.set_step(4)
    recorder.begin(Operation.TP_ALL_REDUCE, group=group)
    tail = RankTail(path, CLOCK)
    tail.poll()
    spans = joined(Spans, [table for _, table in tail.evidence() if isinstance(table, Spans)])
    assert set(spans.step.tolist()) == {1, 2, 3, 4}
    is_open = spans.duration_ns == -1
    assert spans.operation[is_open].tolist() == [Operation.TP_ALL_REDUCE.number]
    assert spans.collective[is_open].tolist() == [4]
    recorder.close(keep=True, has_failed=True)
    tail.poll()
    assert not tail.is_running
    assert not tail.has_ended_well
    path.unlink()
    assert len(tail.evidence()) == 2, "also when the file's name is gone"
    tail.close()


def test_impossible_records_are_left_out_and_counted(open_box: OpenBox) -> None:
    recorder, path = open_box()
    recorder.record_value(StepValue.GRAD_NORM, math.nan)
    for _ in range(4):
        recorder.end(recorder.begin(FORWARD))
    with path.open("r+b") as file:
        for sequence, offset, raw in (
            (2, 8, b"\xff" * 8),  # a start far in the future
            (3, 16, b"\xfe" * 8),  # a duration of centuries
            (4, 54, b"\xff\xff"),  # no such operation
        ):
            file.seek(RING_OFFSET + sequence * 64 + offset)
            file.write(raw)
    tail = RankTail(path, CLOCK)
    found = dict(tail.poll())
    assert isinstance(found[Spans], Spans)
    assert found[Spans].sequence.tolist() == [5]
    assert isinstance(found[Values], Values)
    assert np.isnan(found[Values].value).tolist() == [True], "a missing number is a change, not an error"
    assert tail.num_invalid == 3
    tail.close()
