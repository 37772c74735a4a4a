"""The records of a rank for hang detection, and the control page that switches its recording."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.reader import write_control
from megatrain.contracts.black_box.values import ALL_OPERATIONS, ControlPage, Phase, Record, RecordFlag, attended_bits
from tests.unit.telemetry.conftest import Boxed

Boxes = Callable[..., Boxed]


def awaited(box: Boxed) -> tuple[int, int]:
    progress = box.read().progress
    return progress.awaited_group, progress.awaited_place


def test_awaited_exchange_is_distinguished_from_pending_ones(boxed: Boxes) -> None:
    box = boxed()
    recorder = box.recorder
    first, second = recorder.add_group("dp", [0, 2]), recorder.add_group("pp", [2, 3])
    assert awaited(box) == (0, 0)
    reduction = recorder.begin(Operation.GRADS_REDUCE_SCATTER, group=first)
    assert awaited(box) == (0, 0)
    receive = recorder.begin(Operation.FORWARD_RECV, group=second)
    recorder.await_end(receive)
    assert awaited(box) == (second, 1)
    recorder.end(receive)
    assert box.read().groups[second].left == 1, "the wait is over"
    recorder.await_end(reduction)
    assert awaited(box) == (first, 1)
    recorder.end(reduction)
    recorder.await_end(reduction)
    recorder.await_end(0)
    assert awaited(box) == (first, 1)


def test_unmeasured_exchange_is_awaited_too(boxed: Boxes) -> None:
    box = boxed()
    group = box.recorder.add_group("dp", [0, 2])
    write_control(box.path, ControlPage(span_mask=0, round=1))
    box.recorder.set_step(0)
    token = box.recorder.begin(Operation.DP_ALL_REDUCE, group=group)
    box.recorder.await_end(token)
    assert awaited(box) == (group, 1)
    assert (box.read().groups[group].entered, box.read().groups[group].left) == (1, 0)
    box.recorder.end(token)
    assert (box.read().groups[group].entered, box.read().groups[group].left) == (1, 1)


def test_duration_of_a_phase_is_learned_after_the_first_step(boxed: Boxes) -> None:
    box = boxed()
    recorder = box.recorder
    recorder.set_phase(Phase.CHECKPOINT)  # the load
    recorder.set_step(0)
    assert box.read().progress.longest_checkpoint_ns is None
    recorder.complete_step()
    recorder.set_phase(Phase.CHECKPOINT)
    began = time.monotonic_ns()
    while time.monotonic_ns() < began + 2_000_000:
        pass
    recorder.set_phase(Phase.EVALUATION)
    longest = box.read().progress.longest_checkpoint_ns
    assert longest is not None
    assert longest >= 2_000_000
    recorder.set_step(1)
    assert box.read().progress.longest_evaluation_ns is not None
    recorder.set_phase(Phase.CHECKPOINT)
    recorder.set_step(2)
    assert box.read().progress.longest_checkpoint_ns == longest, "a shorter one changes nothing"


def test_sign_of_life_renews_a_phase_and_keeps_its_length(boxed: Boxes) -> None:
    box = boxed()
    recorder = box.recorder
    recorder.set_step(0)
    recorder.complete_step()
    recorder.set_phase(Phase.CHECKPOINT)
    began = box.read().progress.phase_since_ns
    while time.monotonic_ns() < began + 2_000_000:
        pass
    recorder.show_liveness()
    assert box.read().progress.phase_since_ns >= began + 2_000_000
    assert box.read().progress.phase is Phase.CHECKPOINT
    recorder.set_step(1)
    assert (box.read().progress.longest_checkpoint_ns or 0) >= 2_000_000


class WaitClock:
    """Replaces the monotonic clock; a test sets `now`."""

    def __init__(self) -> None:
        self.now = 10**15

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WaitClock:
    clock = WaitClock()
    for module in ("recorder", "span_recorder"):
        monkeypatch.setattr(f"megatrain.telemetry.{module}.monotonic_ns", clock)
    return clock


def test_span_records_launch_and_wait_times_of_the_host(boxed: Boxes, clock: WaitClock) -> None:
    box = boxed()
    recorder = box.recorder
    recorder.set_step(0)
    group = recorder.add_group("dp", [0, 2])
    at_once = recorder.begin(Operation.TP_ALL_GATHER, group=group)
    clock.now += 1000
    recorder.launched(at_once)
    recorder.await_end(at_once)
    clock.now += 260
    recorder.end(at_once)
    half = recorder.begin(Operation.TP_REDUCE_SCATTER, group=group, is_watched=True)
    clock.now += 100
    recorder.launched(half)
    clock.now += 630
    recorder.await_end(half)
    clock.now += 530
    recorder.end(half)
    never = recorder.begin(Operation.DP_ALL_REDUCE, group=group)
    clock.now += 1260
    recorder.end(never)
    with recorder.span(Operation.FORWARD_COMPUTE):
        clock.now += 1260

    found = box.read().records
    assert [one.attended_ns for one in found] == [1260, 630, 0, None]
    assert [RecordFlag.WATCHED in one.flags for one in found] == [False, True, False, False]
    totals = recorder.complete_step().totals
    assert {operation.value: total.attended_ns for operation, total in totals.items()} == {
        "tp-all-gather": 1260, "tp-reduce-scatter": 630, "dp-all-reduce": 0, "forward-compute": None,
    }  # fmt: skip


def test_wait_for_a_queued_exchange_starts_with_the_exchange(boxed: Boxes, clock: WaitClock) -> None:
    box = boxed()
    recorder = box.recorder
    recorder.set_step(0)
    group = recorder.add_group("dp", [0, 2])
    token = recorder.begin(Operation.PARAMS_ALL_GATHER, group=group)
    recorder.await_end(token)
    clock.now += 500
    recorder.begin_now(token)
    clock.now += 400
    recorder.end(token)

    (record,) = box.read().records
    assert (record.start_ns, record.duration_ns, record.attended_ns) == (record.launch_ns + 500, 400, 400)
    assert recorder.complete_step().totals[Operation.PARAMS_ALL_GATHER].attended_ns == 400


def test_waiting_for_what_has_ended_leaves_nothing_behind(boxed: Boxes) -> None:
    recorder = boxed().recorder
    token = recorder.begin(Operation.PARAMS_ALL_GATHER, group=recorder.add_group("dp", [0, 2]))
    recorder.end(token)
    recorder.await_end(token)
    recorder.launched(token)

    assert not recorder._awaited
    assert not recorder._launched


@given(attended=st.integers(0, 10**12), duration=st.integers(0, 10**12))
def test_attended_part_of_a_span_is_recorded_to_one_percent(attended: int, duration: int) -> None:
    record = Record(1, 0, duration, 0, 0, 0, 1, -1, -1, 9, 1, RecordFlag(attended_bits(attended, duration)))

    assert record.attended_ns is not None
    assert abs(record.attended_ns - min(attended, duration)) <= 0.004 * duration + 1
    assert record.flags & 0xFF == 0
    assert int(record.flags) < 2**15, "a column of events can hold this value"


FORWARD = Operation.FORWARD_COMPUTE


def mask_of(*operations: Operation) -> int:
    return sum(1 << operation.number for operation in operations)


def test_the_span_mask_is_obeyed_from_the_next_step_on(boxed: Boxes) -> None:
    box = boxed()
    recorder = box.recorder
    tp = recorder.add_group("tp", [2, 3])

    def one_step(step: int) -> list[str]:
        seen = box.read().cursor
        recorder.set_step(step)
        with recorder.span(FORWARD), recorder.span(Operation.TP_ALL_REDUCE, group=tp):
            pass
        recorder.complete_step()
        return [record.operation for record in box.read().records if record.sequence > seen]

    assert one_step(1) == ["forward-compute", "tp-all-reduce"]
    open_across_the_change = recorder.begin(Operation.TP_ALL_REDUCE)
    write_control(box.path, ControlPage(span_mask=mask_of(FORWARD), round=3))
    assert recorder.control.round == 0, "the page is read once a step"
    assert one_step(2) == ["forward-compute"]
    recorder.end(open_across_the_change)
    assert not box.read().in_flight
    assert recorder.control.round == 3
    summary = recorder.step_summary()
    assert summary is not None
    assert set(summary.totals) == {FORWARD}
    write_control(box.path, ControlPage(span_mask=0))
    assert one_step(3) == []
    assert box.read().totals[-1].step == 2, "nothing is recorded when recording is off"
    assert box.read().progress.completed_step == 3, "but the heartbeat is"
    write_control(box.path, ControlPage())
    assert one_step(4) == ["forward-compute", "tp-all-reduce"]


def test_every_step_is_on_record_whichever_are_streamed(boxed: Boxes) -> None:
    box = boxed()
    recorder = box.recorder
    tp = recorder.add_group("tp", [2, 3])
    write_control(box.path, ControlPage(sample_period=3))
    for step in range(7):
        recorder.set_step(step)
        with recorder.span(Operation.TP_ALL_REDUCE, group=tp, num_bytes=5):
            pass
        assert recorder.complete_step().totals[Operation.TP_ALL_REDUCE].num_bytes == 5
    found = box.read()
    assert [record.step for record in found.records] == list(range(7)), "the step that will hang is unknown"
    assert [total.step for total in found.totals] == list(range(7))
    assert (found.groups[tp].entered, found.groups[tp].left) == (7, 7), "the hang rule works in every step"


def test_sequence_numbers_agree_across_a_late_switch(boxed: Boxes) -> None:
    box = boxed()
    recorder = box.recorder
    tp = recorder.add_group("tp", [2, 3])
    for step, mask in enumerate((ALL_OPERATIONS, 0, 0, ALL_OPERATIONS)):
        write_control(box.path, ControlPage(span_mask=mask))
        recorder.set_step(step)
        with recorder.span(Operation.TP_ALL_REDUCE, group=tp):
            group = box.read().groups[tp]
            assert (group.entered, group.left) == (step + 1, step)
        assert box.read().groups[tp].left == step + 1
    assert [(record.step, record.collective_sequence) for record in box.read().records] == [(0, 1), (3, 4)]


def test_commands_are_acknowledged(boxed: Boxes) -> None:
    box = boxed()
    write_control(box.path, ControlPage(command_number=5, command=1, lease_ok_until_ns=77))
    control = box.recorder.read_control()
    assert (control.command_number, control.command, control.lease_ok_until_ns) == (5, 1, 77)
    assert box.recorder.control == control
    box.recorder.set_completed_command(5)
    assert box.read().progress.completed_command == 5


def test_a_half_written_control_page_changes_nothing(boxed: Boxes) -> None:
    box = boxed()
    write_control(box.path, ControlPage(round=1))
    assert box.recorder.read_control().round == 1
    with box.path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\7")
        file.seek(4096 + 48)
        file.write(b"\xff")
    assert box.recorder.read_control().round == 1
    write_control(box.path, ControlPage(round=2))
    assert box.recorder.read_control().round == 2
