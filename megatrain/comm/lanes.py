"""Lanes: exchanges of one group or link, carried out one after another. gloo.py uses them; a GPU needs none.

gloo carries out all started exchanges at the same time, so the data that is needed first arrives as late as the data
that is needed last. It reports the completion of an exchange only to a thread that waits for it. A lane carries out one
exchange after another, and records when each really began and ended. The order is the order of submission; the schedule
submits exchanges in the order in which they are needed (schedule/lowering.py). The order never depends on timing, so it
is the same on all ranks of a group.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread

import torch
from torch import Tensor

from megatrain.comm.exchange import Exchange, ExchangeRunner, Pending, Work

_MAX_STARTED = 2
"""The maximum number of started exchanges of a lane: the one that has its turn, and the next."""
_IDLE_S = 5.0
"""A lane's thread ends after this time without an exchange; the next exchange starts another thread."""


def submit_in(lane: Lane | AwaitedLane, runner: ExchangeRunner, result: Tensor, exchange: Exchange) -> Pending:
    """Start `exchange`, which fills `result`, once it is among the first two of `lane`. The Pending raises errors."""
    task = _Task(runner, exchange, runner.begin_span(exchange, is_watched=True))
    lane.add(task)
    return Pending(result, partial(lane.finish, task), task.has_ended.is_set)


class Lane:
    """Carries out the exchanges that one thread submits, in that order, one after the other.

    Two exchanges are started at a time: while one transfers data, the ranks agree on the next. After a failure every
    later exchange fails with the same error, because the ranks may no longer agree on the order.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._lock = Lock()
        self._num_open = 0
        """Tasks that have not ended: those in the queue, and those that the thread has taken from it."""
        self._num_unstarted = 0
        """Open tasks that the thread must start."""
        self._is_running = False
        self._error: BaseException | None = None

    def add(self, task: _Task) -> None:
        """Start `task` now if it is among the first two; otherwise the lane's thread starts it later."""
        with self._lock:
            # the lane's thread may be starting a pending exchange at this moment, and no other thread may overtake it
            is_near = self._num_open < _MAX_STARTED and not self._num_unstarted and task.may_start_at_once
            has_turn = self._num_open == 0
            self._num_open += 1
            self._num_unstarted += not is_near
        if is_near:
            # outside of the lock: a start may allocate memory, and the lane's thread needs the lock to continue
            self._error = self._error or task.start_at_once(has_turn=has_turn)
            task.is_started = True  # before the task is in the queue, where the lane's thread finds it
        with self._lock:
            # both under the lock, so that the thread cannot end between the two
            self._tasks.put(task)
            if not self._is_running:
                self._is_running = True
                Thread(target=self._run, name=f"lane-{self._name}", daemon=True).start()

    def finish(self, task: _Task) -> None:
        """Block until `task` has ended. Raises: the error of the exchange."""
        task.finish()

    @torch.no_grad()  # a new thread starts with gradients enabled, even if the submitting thread has disabled them
    def _run(self) -> None:
        taken: deque[_Task] = deque()
        while self._take(taken):
            for task in taken:  # the next one too, so that the ranks agree on it while the first transfers data
                self._start(task, has_turn=task is taken[0])
            task = taken.popleft()
            self._error = self._error or task.carry_out()  # after a failure, nothing is started or awaited any more
            task.end(self._error)
            del task  # frees the memory of the exchanged tensors
            # The waiting thread may submit another exchange before this. That exchange then starts without the turn,
            # and its span begins when this thread reaches it.
            with self._lock:
                self._num_open -= 1

    def _take(self, taken: deque[_Task]) -> bool:
        """Fill `taken` up with the next tasks. Returns False if there is none: then the thread must end."""
        while not taken:
            try:
                taken.append(self._tasks.get(timeout=_IDLE_S))
            except Empty:
                with self._lock:
                    # `add` may have put a task since; under the lock, `add` finds this thread running or starts another
                    if self._tasks.empty():
                        self._is_running = False
                        return False
        with suppress(Empty):  # without waiting for a second task: the first already has its turn
            while len(taken) < _MAX_STARTED:
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
    """A lane without a thread: the thread that waits for an exchange starts and ends the exchanges, in their order.

    So the exchanges in progress at any moment depend only on the program, not on the speed of the peers. Memory plans
    use this class, because no exchange ends before a caller waits for it.
    """

    def __init__(self) -> None:
        self._open: deque[_Task] = deque()
        self._error: BaseException | None = None

    def add(self, task: _Task) -> None:
        """Start `task` if it is one of the first two tasks that have not ended."""
        self._open.append(task)
        self._start_first()

    def finish(self, task: _Task) -> None:
        """Carry out all tasks up to `task`. Raises: the error of the exchange."""
        while not task.has_ended.is_set():
            first = self._open.popleft()  # the order is that of submission, whichever task is awaited
            self._error = self._error or first.carry_out()
            first.end(self._error)
            self._start_first()
        task.finish()

    def _start_first(self) -> None:
        for task in [*self._open][:_MAX_STARTED]:
            if not task.is_started:
                self._error = self._error or task.start(has_turn=task is self._open[0])
                task.is_started = True


class _Task:
    """One exchange in a lane. It may start before it has its turn; its span begins with the turn."""

    __slots__ = ("_error", "_exchange", "_has_begun", "_runner", "_token", "_work", "has_ended", "is_started")

    def __init__(self, runner: ExchangeRunner, exchange: Exchange, token: int) -> None:
        self._runner = runner
        self._exchange: Exchange | None = exchange
        self._token = token
        self._work: Work | None = None
        self._error: BaseException | None = None
        self._has_begun = False
        self.is_started = False
        """True also if the start failed."""
        self.has_ended = Event()

    @property
    def may_start_at_once(self) -> bool:
        return self._runner.starts_at_once

    def start_at_once(self, *, has_turn: bool) -> BaseException | None:
        """Start the exchange in the submitting thread, before the lane's thread wakes up. Returns its error."""
        if has_turn:
            self._begin()  # the exchange before it may have begun and ended since this one was submitted
        self._start()
        if has_turn:  # otherwise the span begins later than this launch
            self._runner.recorder.launched(self._token)
        return self._error

    def start(self, *, has_turn: bool) -> BaseException | None:
        """Start the exchange in the thread that carries it out. Returns its error."""
        if has_turn:
            self._begin()
        self._start()
        return self._error

    def carry_out(self) -> BaseException | None:
        """Wait for the end of the exchange, which now has its turn. Returns its error."""
        if self._work is not None:  # None if the start failed or an earlier failure prevented it
            assert self._exchange is not None
            try:
                self._begin()
                self._runner.finish(self._exchange, self._work, self._token)
            except BaseException as error:  # noqa: BLE001 -- every error is raised in the thread that waits
                self._error = error
        return self._error

    def end(self, error: BaseException | None) -> None:
        """Drop the references to the exchanged tensors, and wake the waiter."""
        self._exchange, self._work, self._error = None, None, error
        self.has_ended.set()  # last: the waiter reads the error without a lock

    def finish(self) -> None:
        """Block until the end. Raises: the error of the exchange."""
        if not self.has_ended.is_set():  # the span of an ended exchange is closed, and no wait is recorded
            self._runner.recorder.await_end(self._token)
            self.has_ended.wait()
        if self._error is not None:
            raise self._error

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._runner.recorder.begin_now(self._token)

    def _start(self) -> None:
        assert self._exchange is not None
        try:
            self._work = self._runner.start(self._exchange)
        except KeyboardInterrupt:
            raise  # the user interrupted the submitting thread
        except BaseException as error:  # noqa: BLE001 -- every error is raised in the thread that waits
            self._error = error
