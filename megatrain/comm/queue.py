"""The single path of a rank's exchanges: it records, orders and bounds them, and names their failures.

An exchange is submitted by a group or a channel and becomes a Pending. On an accelerator it starts at once: there the
library has a stream for each group, which orders and bounds, and mesh.py gives these streams their priorities. On CPUs
gloo carries out all that it is given side by side, so that what is needed first arrives as late as what is needed last;
and only the waiter learns of completion. So groups whose exchanges are awaited later have a lane
there: a thread that carries out one exchange after the other, and has the next one started when its turn is near. It
knows when each has really begun and ended.
The order in a lane is that of submission, which the schedule makes the order of need (schedule/lowering.py); it never
depends on time, so that all ranks of a group have the same.
Source: MegaScale sec. 3.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Protocol

import torch
from torch import Tensor

from megatrain.contracts.errors import CommunicationError
from megatrain.contracts.operations import Operation
from megatrain.telemetry.recorder import Recorder

_MOST_STARTED = 2
"""Of a lane: the exchange that has its turn, and the next."""
_IDLE_S = 5.0
"""After so long without an exchange a lane's thread ends; the next one gets another."""


class Work(Protocol):
    """What a library returns for something that it has started, as torch's dist.Work."""

    def wait(self) -> object:
        """Block until the end, or let the device's stream wait."""

    def is_completed(self) -> bool:
        """Whether it has ended; a library that does not know says no."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective, send or receive of this rank."""

    operation: Operation
    group: int
    """Its number in the black box."""
    num_bytes: int
    start: Callable[[], Work]
    wait: Callable[[Any], object]
    failure: Callable[[Exception], CommunicationError]
    """Names this rank's operation and the ranks involved."""
    chunk: int = -1
    microbatch: int = -1
    prepare: Callable[[], None] | None = None
    """Takes memory for what arrives, when it is about to start."""
    then: Callable[[], None] | None = None
    """Makes the result of what has arrived."""


class Pending:
    """An exchange under way. `wait` blocks until `result` may be used; waiting again is free."""

    __slots__ = ("_finish", "_is_completed", "result")

    def __init__(
        self, result: Tensor, finish: Callable[[], None] | None = None, is_completed: Callable[[], bool] | None = None
    ) -> None:
        """finish: blocks until the end; None where there is nothing to wait for. Without is_completed the end is
        unknown."""
        self.result = result
        self._finish = finish
        self._is_completed = is_completed

    def wait(self) -> Tensor:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return self.result

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._finish is None or (self._is_completed is not None and self._is_completed())


class CommunicationQueue:
    """All exchanges of a rank.

    before: called with each exchange when its turn has come, before it starts. For tests, which delay and break some.
    """

    def __init__(self, recorder: Recorder, before: Callable[[Exchange], None] | None = None) -> None:
        self.recorder = recorder
        self._before = before

    @property
    def starts_at_once(self) -> bool:
        """Whether the submitting thread may start an exchange itself: not while the lane is held."""
        return self._before is None

    def submit(self, result: Tensor, exchange: Exchange, lane: Lane | AwaitedLane | None) -> Pending:
        """Start `exchange`, which fills `result`, now or when its turn in `lane` comes.

        Raises: CommunicationError where it could not be started; its Pending raises what goes wrong later.
        """
        token = self.recorder.begin(
            exchange.operation,
            chunk=exchange.chunk,
            microbatch=exchange.microbatch,
            num_bytes=exchange.num_bytes,
            group=exchange.group,
            is_watched=lane is not None,
        )
        if lane is not None:
            task = _Task(self, exchange, token)
            lane.add(task)
            return Pending(result, partial(lane.finish, task), task.has_ended.is_set)
        work = self.started(exchange)
        self.recorder.launched(token)

        def finish() -> None:
            self.recorder.await_end(token)
            self.finish(exchange, work, token)

        return Pending(result, finish, work.is_completed)

    def started(self, exchange: Exchange) -> Work:
        """Start it. Raises: CommunicationError."""
        if self._before is not None:
            self._before(exchange)
        try:
            if exchange.prepare is not None:
                exchange.prepare()
            return self._begin(exchange)
        except torch.OutOfMemoryError:
            raise  # no peer's doing
        except RuntimeError as error:
            raise exchange.failure(error) from error

    def finish(self, exchange: Exchange, work: Work, token: int) -> None:
        """Wait for its end. Raises: CommunicationError."""
        try:
            self._end(exchange, work)
        except RuntimeError as error:
            raise exchange.failure(error) from error
        if exchange.then is not None:
            exchange.then()
        self.recorder.end(token)

    def _begin(self, exchange: Exchange) -> Work:
        return exchange.start()

    def _end(self, exchange: Exchange, work: Work) -> None:
        exchange.wait(work)


class DryQueue(CommunicationQueue):
    """Takes and gives back the memory of exchanges, and carries none of them out: for runs without peers, on meta."""

    def _begin(self, exchange: Exchange) -> Work:
        return _Nothing()

    def _end(self, exchange: Exchange, work: Work) -> None:
        work.wait()


class _Nothing:
    """What a DryQueue has started."""

    def wait(self) -> None:
        """It has ended."""

    def is_completed(self) -> bool:
        return True


class Lane:
    """Carries out the exchanges that one thread submits, in that order, each when the one before has ended.

    Two at a time are given to the library: while one travels, the ranks agree on the next. After a failure whatever
    comes later fails with the same error: the group has lost its order.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._lock = Lock()
        self._num_open = 0
        self._num_unstarted = 0
        self._is_running = False
        self._error: BaseException | None = None

    def add(self, task: _Task) -> None:
        """Start `task`, or let it start when its turn is near."""
        with self._lock:
            # the lane's thread starts pending exchanges, perhaps right now: no other thread may overtake it
            is_near = self._num_open < _MOST_STARTED and not self._num_unstarted and task.may_start_at_once
            has_turn = self._num_open == 0
            self._num_open += 1
            self._num_unstarted += not is_near
        if is_near:
            self._error = self._error or task.start_at_once(has_turn=has_turn)
            task.is_started = True
        with self._lock:
            self._tasks.put(task)
            if not self._is_running:
                self._is_running = True
                Thread(target=self._run, name=f"lane-{self._name}", daemon=True).start()

    def finish(self, task: _Task) -> None:
        """Block until `task` has ended. Raises: what went wrong."""
        task.finish()

    @torch.no_grad()  # a new thread starts with gradients enabled, whatever the submitting thread's setting
    def _run(self) -> None:
        taken: deque[_Task] = deque()
        while self._take(taken):
            for task in taken:
                self._start(task, has_turn=task is taken[0])
            task = taken.popleft()
            self._error = self._error or task.carry_out()
            task.end(self._error)
            del task  # and with it the memory of what was exchanged
            with self._lock:
                self._num_open -= 1

    def _take(self, taken: deque[_Task]) -> bool:
        """Add the next tasks, of which the thread has some at a time. Returns whether it has any; else it is to end."""
        while not taken:
            try:
                taken.append(self._tasks.get(timeout=_IDLE_S))
            except Empty:
                with self._lock:
                    if self._tasks.empty():
                        self._is_running = False
                        return False
        with suppress(Empty):
            while len(taken) < _MOST_STARTED:
                taken.append(self._tasks.get_nowait())
        return True

    def _start(self, task: _Task, *, has_turn: bool) -> None:
        if task.is_started:
            return
        self._error = self._error or task.start(has_turn=has_turn)
        task.is_started = True
        with self._lock:
            self._num_unstarted -= 1


class AwaitedLane:
    """A lane without a thread: its exchanges start and end, in their order, in the thread that awaits one of them.

    So what is under way at any moment follows from the program alone, and not from how fast the peers are. It is what
    plans of memory count by: nothing ends before it is awaited.
    """

    def __init__(self) -> None:
        self._open: deque[_Task] = deque()
        self._error: BaseException | None = None

    def add(self, task: _Task) -> None:
        """Start `task` if it is one of the first two that have not ended."""
        self._open.append(task)
        self._start_first()

    def finish(self, task: _Task) -> None:
        """Carry out all up to `task`. Raises: what went wrong."""
        while not task.has_ended.is_set():
            first = self._open.popleft()
            self._error = self._error or first.carry_out()
            first.end(self._error)
            self._start_first()
        task.finish()

    def _start_first(self) -> None:
        for task in [*self._open][:_MOST_STARTED]:
            if not task.is_started:
                self._error = self._error or task.start(has_turn=task is self._open[0])
                task.is_started = True


class _Task:
    """One exchange in a lane. It may be started before it has its turn; its span begins with that."""

    __slots__ = ("_error", "_exchange", "_has_begun", "_queue", "_token", "_work", "has_ended", "is_started")

    def __init__(self, queue: CommunicationQueue, exchange: Exchange, token: int) -> None:
        self._queue = queue
        self._exchange: Exchange | None = exchange
        self._token = token
        self._work: Work | None = None
        self._error: BaseException | None = None
        self._has_begun = False
        self.is_started = False
        """Or will never be."""
        self.has_ended = Event()

    @property
    def may_start_at_once(self) -> bool:
        return self._queue.starts_at_once

    def start_at_once(self, *, has_turn: bool) -> BaseException | None:
        """Start it before the lane's thread has woken up. Returns what went wrong."""
        if has_turn:
            self._begin()  # since it was submitted the one before may have begun and ended
        self._start()
        if has_turn:
            self._queue.recorder.launched(self._token)
        return self._error

    def start(self, *, has_turn: bool) -> BaseException | None:
        """Start it in the lane's thread. Returns what went wrong."""
        if has_turn:
            self._begin()
        self._start()
        return self._error

    def carry_out(self) -> BaseException | None:
        """Wait for the end of what was started: it has its turn now. Returns what went wrong."""
        if self._work is not None:
            assert self._exchange is not None
            try:
                self._begin()
                self._queue.finish(self._exchange, self._work, self._token)
            except BaseException as error:  # noqa: BLE001 -- raised in the thread that waits, whatever it is
                self._error = error
        return self._error

    def end(self, error: BaseException | None) -> None:
        """Let go what was exchanged, and whoever waits."""
        self._exchange, self._work, self._error = None, None, error
        self.has_ended.set()

    def finish(self) -> None:
        """Block until the end. Raises: what went wrong."""
        if not self.has_ended.is_set():
            self._queue.recorder.await_end(self._token)
            self.has_ended.wait()
        if self._error is not None:
            raise self._error

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._queue.recorder.begin_now(self._token)

    def _start(self) -> None:
        assert self._exchange is not None
        try:
            self._work = self._queue.started(self._exchange)
        except KeyboardInterrupt:
            raise  # of the thread that submits
        except BaseException as error:  # noqa: BLE001 -- raised in the thread that waits, whatever it is
            self._error = error
