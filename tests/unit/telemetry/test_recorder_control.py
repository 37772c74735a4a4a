"""The control page: the launcher and the streamer write it, and the recorder reads it once a step."""

from __future__ import annotations

from collections.abc import Callable

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.reader import write_control
from megatrain.contracts.black_box.values import ALL_OPERATIONS, ControlPage
from tests.unit.telemetry.conftest import Boxed

Boxes = Callable[..., Boxed]
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
