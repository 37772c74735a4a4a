"""A lane carries out one exchange after another, records when each began and ended, and stops after a failure."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.comm import lanes
from megatrain.comm.exchange import Exchange, ExchangeRunner, Pending, Transfer
from megatrain.comm.lanes import AwaitedLane, Lane, submit_in
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.reader import read_black_box
from megatrain.contracts.black_box.values import Identity, RecordFlag
from megatrain.contracts.errors import CommunicationError
from megatrain.contracts.layout import Layout
from megatrain.telemetry.recorder import Recorder, open_recorder
from tests.helpers.single_rank import SilentRecorder
from tests.helpers.waiting import DEADLINE_S, wait_until


@pytest.fixture(autouse=True)
def _end_threads_of_lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the threads of lanes end soon after their last exchange, and wait for them."""
    monkeypatch.setattr(lanes, "_IDLE_S", 0.01)
    before = threads_of_lanes()
    yield
    wait_until(lambda: threads_of_lanes() <= before, "the threads of the lanes to end")


def threads_of_lanes(name: str = "") -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name.startswith(f"lane-{name}")}


class LaneWork:
    """The handle of an exchange. The exchange runs until the test sets `has_ended`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.has_ended = threading.Event()
        self.error = error
        self.waiting_thread: threading.Thread | None = None

    def wait(self) -> None:
        self.waiting_thread = threading.current_thread()
        assert self.has_ended.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return self.has_ended.is_set()


class Link:
    """Submits exchanges, and records the names of those that are started."""

    def __init__(self, before: Callable[[Exchange], None] | None = None, recorder: Recorder | None = None) -> None:
        self.path = ExchangeRunner(SilentRecorder() if recorder is None else recorder, before)
        self.started: list[str] = []
        self.works: dict[str, LaneWork] = {}

    def submit(
        self,
        name: str,
        lane: Lane | AwaitedLane | None,
        *,
        result: Tensor | None = None,
        error: Exception | None = None,
        start_error: Exception | None = None,
        then: Callable[[], None] | None = None,
    ) -> Pending:
        self.works[name] = work = LaneWork(error)

        def start() -> Any:
            self.started.append(name)
            if start_error is not None:
                raise start_error
            return work

        exchange = Exchange(
            Operation.PARAMS_ALL_GATHER,
            0,
            8,
            Transfer(start, then=then),
            lambda e: CommunicationError(f"{name}: {e}"),
        )
        result = torch.zeros(1) if result is None else result
        return self.path.submit(result, exchange) if lane is None else submit_in(lane, self.path, result, exchange)


def until_started(link: Link, names: list[str]) -> None:
    wait_until(lambda: link.started == names, f"{names} to be started")


def test_lane_starts_two_exchanges_at_a_time() -> None:
    link, lane = Link(), Lane("dp")
    first, second, third = (link.submit(name, lane) for name in ("first", "second", "third"))

    until_started(link, ["first", "second"])
    assert not first.is_done()
    link.works["second"].has_ended.set()
    assert not second.is_done(), "its turn comes after the first"
    link.works["first"].has_ended.set()
    until_started(link, ["first", "second", "third"])
    second.wait()
    second.wait()
    assert first.is_done()
    assert not third.is_done()
    link.works["third"].has_ended.set()
    third.wait()
    first.wait()


def test_running_exchange_is_not_overtaken() -> None:
    link, lane, names = Link(), Lane("dp"), [str(number) for number in range(200)]
    pending = []
    for number, name in enumerate(names):
        pending.append(link.submit(name, lane))
        if number % 3 == 2:  # The lane's thread starts some exchanges while others are submitted.
            for ended in names[: number - 1]:
                link.works[ended].has_ended.set()
    for name in names:
        link.works[name].has_ended.set()
    for one in pending:
        one.wait()

    assert link.started == names


def test_queued_exchange_is_not_overtaken() -> None:
    """This holds even if the lane missed an exchange that was counted but not yet queued while the previous one
    ended."""
    link, lane, may_take = Link(), Lane("dp"), threading.Event()
    lock, tasks, submitter, num_entered = lane._lock, lane._tasks, threading.current_thread(), [0]

    class LockHook:
        """Between counting and queueing the third exchange, the first one ends, and the second one is taken alone."""

        def __enter__(self) -> None:
            if threading.current_thread() is submitter:
                num_entered[0] += 1
                if num_entered[0] == 6:
                    link.works["first"].has_ended.set()
                    wait_until(lambda: link.works["second"].waiting_thread is not None, "second's turn")
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    class TasksHook:
        """The third exchange is taken late."""

        put, get_nowait, empty = tasks.put, tasks.get_nowait, tasks.empty

        @staticmethod
        def get(timeout: float) -> Any:
            if "second" in link.works and link.works["second"].has_ended.is_set():
                assert may_take.wait(DEADLINE_S)
            return tasks.get(timeout=timeout)

    lane._lock, lane._tasks = LockHook(), TasksHook()  # type: ignore[assignment]
    pending = [link.submit(name, lane) for name in ("first", "second", "third")]
    link.works["second"].has_ended.set()
    wait_until(lambda: lane._num_open == 1, "the end of the second one")
    pending.append(link.submit("fourth", lane))
    may_take.set()
    for name in ("third", "fourth"):
        link.works[name].has_ended.set()
    for one in pending:
        one.wait()

    assert link.started == ["first", "second", "third", "fourth"]


def test_delay_hook_runs_in_the_lanes_thread() -> None:
    threads: list[threading.Thread] = []
    link, lane = Link(lambda _: threads.append(threading.current_thread())), Lane("dp")
    pending = [link.submit(name, lane) for name in ("first", "second", "third")]
    for work in link.works.values():
        work.has_ended.set()
    for one in pending:
        one.wait()

    assert link.started == ["first", "second", "third"]
    assert {thread.name for thread in threads} == {"lane-dp"}


def test_lanes_do_not_wait_for_each_other() -> None:
    link, one, other = Link(), Lane("dp"), Lane("link")
    link.submit("stuck", one)
    free = link.submit("free", other)

    link.works["free"].has_ended.set()
    free.wait()
    assert not link.works["stuck"].has_ended.is_set()
    link.works["stuck"].has_ended.set()


def test_exchange_without_a_lane_starts_at_once() -> None:
    link = Link()
    pending = link.submit("only", None)

    assert link.started == ["only"]
    assert not pending.is_done()
    link.works["only"].has_ended.set()
    assert pending.is_done()
    pending.wait()
    assert link.works["only"].waiting_thread is threading.current_thread()


@pytest.mark.parametrize("has_lane", [False, True])
def test_result_is_complete_before_it_can_be_used(has_lane: bool) -> None:
    link, result = Link(), torch.zeros(1)
    pending = link.submit("sum", Lane("dp") if has_lane else None, result=result, then=lambda: result.fill_(7.0))
    link.works["sum"].has_ended.set()

    assert pending.wait() is result
    assert result.item() == 7.0


def test_exchange_in_a_lane_has_no_gradient() -> None:
    link, lane = Link(), Lane("tp")
    parameter, result = torch.ones(1, requires_grad=True), torch.zeros(1)
    with torch.no_grad():
        pending = link.submit("gather", lane, result=result, then=lambda: result.copy_(parameter))
    link.works["gather"].has_ended.set()

    assert not pending.wait().requires_grad


@pytest.mark.parametrize("where", ["error", "start_error"])
def test_exchanges_after_a_failure_fail_with_its_error(where: str) -> None:
    link, lane = Link(), Lane("dp")
    failing = link.submit("first", lane, **{where: RuntimeError("peer closed")})
    earlier = link.submit("second", lane)
    link.works["first"].has_ended.set()

    for pending in (failing, earlier, link.submit("third", lane)):
        with pytest.raises(CommunicationError, match="first: peer closed"):
            pending.wait()
        assert pending.is_done()
    assert link.started == (["first"] if where == "start_error" else ["first", "second"])


def test_error_of_a_lane_is_raised_in_the_waiting_thread() -> None:
    link, lane = Link(), Lane("dp")
    pending = link.submit("first", lane, start_error=TypeError("no tensor"))

    with pytest.raises(TypeError, match="no tensor"):
        pending.wait()


def test_a_failure_without_a_lane_is_named() -> None:
    link = Link()
    with pytest.raises(CommunicationError, match="first: peer closed"):
        link.submit("first", None, start_error=RuntimeError("peer closed"))
    pending = link.submit("second", None, error=RuntimeError("timed out"))
    link.works["second"].has_ended.set()
    with pytest.raises(CommunicationError, match="second: timed out"):
        pending.wait()


def test_buffers_are_free_after_the_exchange() -> None:
    """No wait is needed: an activation that was sent need not stay until the end of the step."""
    link, lane = Link(), Lane("link")
    sent = torch.zeros(4)
    memory = weakref.ref(sent)
    pending = link.submit("send", lane, result=sent, then=lambda x=sent: None)
    link.works["send"].has_ended.set()
    wait_until(pending.is_done, "the send to end")
    del sent, pending

    def is_free() -> bool:
        gc.collect()
        return memory() is None

    wait_until(is_free, "the memory to be free")
    assert memory() is None


def test_a_span_is_announced_at_once_and_begins_with_its_turn(tmp_path: Path) -> None:
    identity = Identity("demo", "main", 1, 0, Layout(dp_size=2), 1, "a")
    recorder = open_recorder(identity, directory=str(tmp_path), run_key="key", num_records=64)
    link, lane = Link(recorder=recorder), Lane("dp")
    assert recorder.path is not None
    pending = [link.submit(name, lane) for name in ("first", "second")]
    until_started(link, ["first", "second"])
    assert len(read_black_box(recorder.path).in_flight) == 2
    for name, one in zip(("first", "second"), pending, strict=True):
        link.works[name].has_ended.set()
        one.wait()

    first, second = read_black_box(recorder.path).records
    assert first.duration_ns is not None
    assert second.start_ns >= first.start_ns + first.duration_ns
    assert second.launch_ns <= first.start_ns + first.duration_ns
    assert first.flags == second.flags == RecordFlag.WATCHED


def test_span_begins_after_the_previous_one_ended(tmp_path: Path) -> None:
    """A submitting thread may be delayed for long: overlapping spans would show another order than the lane's."""
    identity = Identity("demo", "main", 1, 0, Layout(dp_size=2), 1, "a")
    recorder = open_recorder(identity, directory=str(tmp_path), run_key="key", num_records=64)
    assert recorder.path is not None
    link, pending = Link(recorder=recorder), list[Pending]()

    class LateLane(Lane):
        """The third exchange is announced, and before it enters the lane the second one has begun and ended."""

        def add(self, task: Any) -> None:
            if len(pending) == 2:
                for name, one in zip(("first", "second"), pending, strict=True):
                    link.works[name].has_ended.set()
                    one.wait()
                wait_until(lambda: not self._num_open, "the lane to be empty")
            super().add(task)

    lane = LateLane("dp")
    for name in ("first", "second", "third"):
        pending.append(link.submit(name, lane))
    link.works["third"].has_ended.set()
    pending[2].wait()

    _, second, third = read_black_box(recorder.path).records
    assert second.duration_ns is not None
    assert third.start_ns >= second.start_ns + second.duration_ns


def test_a_lane_without_work_has_no_thread() -> None:
    link, lane = Link(), Lane("rarely")
    for name in ("first", "second"):
        pending = link.submit(name, lane)
        assert len(threads_of_lanes("rarely")) == 1, "a thread while there is work"
        link.works[name].has_ended.set()
        pending.wait()
        wait_until(lambda: not threads_of_lanes("rarely"), "the thread to end")


@pytest.mark.parametrize("has_lane", [False, True])
def test_hook_is_called_before_each_exchange_in_order(has_lane: bool) -> None:
    seen: list[int] = []
    link = Link(lambda exchange: seen.append(exchange.num_bytes))
    pending = link.submit("first", Lane("dp") if has_lane else None)
    link.works["first"].has_ended.set()
    pending.wait()

    assert seen == [8]


def test_awaited_lane_starts_only_when_awaited() -> None:
    link, lane, made = Link(), AwaitedLane(), []
    first, second, third, fourth = (
        link.submit(name, lane, then=lambda name=name: made.append(name)) for name in ("1", "2", "3", "4")
    )
    for work in link.works.values():
        work.has_ended.set()  # the peers are fast

    assert (link.started, made) == (["1", "2"], [])
    second.wait()
    assert (link.started, made) == (["1", "2", "3", "4"], ["1", "2"])
    assert first.is_done()
    assert not third.is_done()
    fourth.wait()
    assert made == ["1", "2", "3", "4"]
    assert all(work.waiting_thread is threading.current_thread() for work in link.works.values())


def test_exchanges_after_a_failure_in_an_awaited_lane_fail() -> None:
    link, lane = Link(), AwaitedLane()
    pending = [
        link.submit("1", lane),
        link.submit("2", lane, error=RuntimeError("connection closed")),
        link.submit("3", lane),
    ]
    for work in link.works.values():
        work.has_ended.set()

    pending[0].wait()
    for one in pending[1:]:
        with pytest.raises(CommunicationError, match="2: connection closed"):
            one.wait()
    assert link.started == ["1", "2", "3"]
