"""The device timer on a simulated device: a queue that runs later than the host launches, with a separate clock."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable

import pytest

from megatrain.contracts.black_box.encoding import Word
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import RecordFlag
from megatrain.telemetry.device_spans import DeviceSpans
from megatrain.telemetry.timers import MAX_EVENTS, DeviceTimer, Lane
from tests.helpers.waiting import wait_until
from tests.unit.telemetry.conftest import Boxed

MS = 1_000_000


class FakeDevice:
    """A device that queues work until `run`. Its clock may run fast or slow; the host's clock is `now_ns`."""

    def __init__(self, drift: float = 0.0) -> None:
        self.now_ns = 5_000_000_000
        self.drift = drift
        self.events: list[FakeEvent] = []
        self.queue: list[FakeEvent | int] = []
        self.num_synchronized = 0
        self.error: Exception | None = None
        """The error of an event's query."""

    def event(self) -> FakeEvent:
        self.events.append(FakeEvent(self))
        return self.events[-1]

    def launch(self, duration_ns: int) -> None:
        self.queue.append(duration_ns)

    def run(self) -> None:
        """Execute all queued work."""
        for item in self.queue:
            if isinstance(item, int):
                self.now_ns += item
            else:
                item.device_ns = self.now_ns * (1 + self.drift)
        self.queue = []

    def synchronize(self) -> None:
        self.num_synchronized += 1
        self.run()

    def timer(self) -> DeviceTimer:
        return DeviceTimer(self.event, self.synchronize, clock=lambda: self.now_ns)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.device_ns: float | None = None

    def record(self) -> None:
        self.device_ns = None
        self.device.queue.append(self)

    def query(self) -> bool:
        if self.device.error is not None:
            raise self.device.error
        return self.device_ns is not None

    def elapsed_time(self, end_event: FakeEvent, /) -> float:
        assert self.device_ns is not None
        assert end_event.device_ns is not None
        milliseconds = (end_event.device_ns - self.device_ns) / MS
        (single,) = struct.unpack("f", struct.pack("f", milliseconds))  # a device driver returns single precision
        return float(single)


def stretch(device: FakeDevice, timer: DeviceTimer, token: int, duration_ns: int, lane: Lane = (3, 0)) -> None:
    timer.start(token, lane)
    device.launch(duration_ns)
    timer.stop(token)


def test_device_times_are_known_later_without_waiting() -> None:
    device = FakeDevice()
    timer = device.timer()
    num_synchronized = device.num_synchronized
    launched = device.now_ns
    stretch(device, timer, 1, 3 * MS)
    stretch(device, timer, 2, 4 * MS)
    assert timer.resolved() == []
    device.run()
    assert timer.resolved() == [(1, launched, 3 * MS, 0), (2, launched + 3 * MS, 4 * MS, 0)]
    assert timer.resolved() == []
    assert device.num_synchronized == num_synchronized


def test_events_are_used_again() -> None:
    device = FakeDevice()
    timer = device.timer()
    for token in range(1000):
        stretch(device, timer, token, MS)
        device.run()
        assert len(timer.resolved()) == 1
    assert len(device.events) <= 4


def test_device_lanes_do_not_wait_for_each_other() -> None:
    device = FakeDevice()
    timer = device.timer()
    timer.start(1, lane=(10, 1))  # a collective on another stream that hangs: its end is never reached
    timer.stop(1)
    hanging_end = device.queue.pop()
    stretch(device, timer, 2, MS, lane=(3, 0))
    stretch(device, timer, 3, MS, lane=(4, 0))
    device.run()
    assert [token for token, *_ in timer.resolved((4, 0))] == [3]
    assert timer.resolved((99, 0)) == []
    assert [token for token, *_ in timer.resolved()] == [2]
    device.queue.append(hanging_end)
    device.run()
    assert [token for token, *_ in timer.resolved()] == [1]


def test_an_end_without_a_beginning_is_ignored() -> None:
    timer = FakeDevice().timer()
    timer.stop(7)
    assert timer.resolved() == []


@pytest.mark.parametrize("drift", [0.0, 2e-4, -2e-4])
def test_device_times_stay_right_with_a_drifting_clock(drift: float) -> None:
    device = FakeDevice(drift)
    timer = device.timer()
    worst = 0
    for token in range(4000):
        device.now_ns += 900 * MS
        launched = device.now_ns
        stretch(device, timer, token, MS)
        device.run()
        ((_, start_ns, duration_ns, _),) = timer.resolved()
        assert launched <= start_ns
        assert start_ns + duration_ns <= device.now_ns + 1000
        worst = max(worst, abs(start_ns - launched))
        assert abs(duration_ns - MS) < 1000
    assert device.now_ns > 3600 * 10**9, "an hour: the resolution of a float is then 0.25 ms"
    assert worst < MS, "the observed bounds contain the clock"


def test_floats_stay_precise_when_the_host_runs_far_ahead() -> None:
    device = FakeDevice()
    timer = device.timer()
    for token in range(4000):
        timer.start(0, (3, 0))
        device.launch(800 * MS)
        timer.stop(0)
        stretch(device, timer, token, MS)
        device.run()
        ended = device.now_ns
        device.now_ns += 100 * MS
        _, (_, start_ns, *_) = timer.resolved()
        assert abs(start_ns - (ended - MS)) < MS // 10


def test_a_span_on_the_device_is_open_until_the_device_is_done(boxed: Callable[..., Boxed]) -> None:
    device = FakeDevice()
    box = boxed(timer=device.timer())
    recorder = box.recorder
    tp = recorder.add_group("tp", [2, 3])
    recorder.set_step(1)
    launched = device.now_ns
    with recorder.span(Operation.TP_ALL_REDUCE, group=tp):
        device.launch(2 * MS)
        (record,) = box.read().in_flight
        assert record.flags == RecordFlag.DEVICE_CLOCK
    (record,) = box.read().in_flight
    assert record.flags == RecordFlag.DEVICE_CLOCK | RecordFlag.HOST_DONE
    assert box.read().groups[tp].left == 0
    device.run()
    summary = recorder.complete_step()
    (record,) = box.read().records
    assert (record.start_ns, record.duration_ns) == (launched, 2 * MS)
    assert box.read().groups[tp].left == 1
    assert summary.totals[Operation.TP_ALL_REDUCE].sum_ns == 2 * MS


def test_host_spans_keep_the_host_clock(boxed: Callable[..., Boxed]) -> None:
    device = FakeDevice()
    box = boxed(timer=device.timer())
    with box.recorder.span(Operation.DATA_WAIT):
        pass

    def fail() -> None:
        with box.recorder.span(Operation.FORWARD_COMPUTE):
            raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        fail()
    device.run()
    box.recorder.set_step(1)
    waited, failed = box.read().records
    assert waited.flags == RecordFlag.NONE
    assert waited.start_ns == waited.launch_ns
    assert failed.flags == RecordFlag.DEVICE_CLOCK | RecordFlag.HOST_DONE | RecordFlag.FAILED
    assert not failed.is_in_flight


def test_device_ends_of_overwritten_records_are_counted(boxed: Callable[..., Boxed]) -> None:
    device = FakeDevice()
    box = boxed(num_records=16, timer=device.timer())
    for microbatch in range(20):
        with box.recorder.span(Operation.FORWARD_COMPUTE, microbatch=microbatch):
            device.launch(MS)
    device.run()
    box.recorder.set_step(1)
    found = box.read()
    assert found.progress.num_lost_ends == 4
    assert [record.duration_ns for record in found.records] == [MS] * 16


def test_unresponsive_device_costs_bounded_memory(boxed: Callable[..., Boxed]) -> None:
    device = FakeDevice()
    box = boxed(num_records=64, timer=device.timer())
    recorder = box.recorder
    recorder.set_step(1)
    for _ in range(MAX_EVENTS // 2 + 100):
        with recorder.span(Operation.FORWARD_COMPUTE):
            device.queue.clear()
    assert len(device.events) <= MAX_EVENTS + 1
    newest = box.read().records[-1]
    assert newest.flags == RecordFlag.NONE, "by the host's clock"
    assert newest.duration_ns is not None
    assert recorder._device is not None
    assert len(recorder._device._launched) == MAX_EVENTS // 2
    for event in device.events:
        event.device_ns = float(device.now_ns)
    recorder.set_step(2)
    assert recorder._open == recorder._device._launched == {}
    assert recorder.complete_step().totals[Operation.FORWARD_COMPUTE].count == MAX_EVENTS // 2 + 100


def test_ended_device_spans_do_not_pile_up_between_steps(boxed: Callable[..., Boxed]) -> None:
    device = FakeDevice()
    recorder = boxed(timer=device.timer()).recorder
    for _ in range(2 * 4096):
        token = recorder.begin(Operation.FORWARD_COMPUTE)
        device.run()
        recorder.end(token)
    device.run()
    assert len(recorder._totals.ended) <= 4096
    recorder.set_step(0)
    assert recorder.complete_step().totals[Operation.FORWARD_COMPUTE].count == 2 * 4096


def test_failed_queries_lose_no_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    timer = device.timer()
    stretch(device, timer, 1, MS, lane=(3, 0))
    stretch(device, timer, 2, MS, lane=(4, 0))
    device.run()

    def fail() -> bool:
        raise RuntimeError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(device.events[-1], "query", fail)
        with pytest.raises(RuntimeError, match="no answer"):
            timer.resolved()
    assert [token for token, *_ in timer.resolved()] == [1, 2]


def test_follower_survives_failed_polls_and_logs_the_first(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice()
    words = memoryview(bytearray(8 * (max(Word) + 1))).cast("q")
    reached: list[RecordFlag] = []
    open_span = (0, 3, 0, 0, 0, 7)
    spans = DeviceSpans(
        device.timer(), words, {}, lambda token, word, flags: reached.append(flags), lambda span, times: None,
        follow_after_ns=1_000,
    )  # fmt: skip
    spans.start(1, 3, 0)
    device.launch(MS)
    spans.launched(1, open_span)
    end = device.queue.pop()
    device.run()
    device.error = RuntimeError("CUDA error: unknown error")
    with caplog.at_level(logging.WARNING, "megatrain.telemetry"):
        spans.start_following()
        wait_until(lambda: spans.num_failed_polls > 2, "failed polls")
        assert (reached, words[Word.DEVICE_SEEN_NS]) == ([], 0), "nothing is known of the device"
        device.error = None
        wait_until(lambda: words[Word.DEVICE_SEEN_NS] > 0, "a poll that succeeds")
        device.queue.append(end)
        device.run()
        spans.close()

    assert reached[0] == RecordFlag.DEVICE_BEGUN
    first = "the device cannot be polled (CUDA error: unknown error): "
    first += "until a poll succeeds, a hang is judged by what the host launched"
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [first, f"{spans.num_failed_polls} polls of the device failed"]
