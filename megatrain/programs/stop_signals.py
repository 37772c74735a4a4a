"""The signals that stop a program: one class for workers, executors, launches, servers and commands.

SIGTERM, SIGUSR1 (Slurm, before the time limit), SIGHUP and SIGINT all make the same request. A program polls for the
request, or gives a callback for the handler to call. A second SIGINT interrupts the program without saving; other later
signals have no effect.

In a forked child of such a program, the earlier handlers are restored before a signal can reach it.

`orderly_end` is for commands that have to clean up. By default SIGTERM, SIGUSR1 and SIGHUP end a Python program
immediately. In `orderly_end` the first one raises SystemExit with the exit code of a shell (128 + the signal's number),
and SIGINT raises KeyboardInterrupt, so that every `with` and `finally` runs. Later signals are ignored, because they
would interrupt this cleanup. SIGKILL cannot be caught.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from megatrain.contracts.closable import Closable

GROUP_SIGNALS: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGHUP,
    signal.SIGQUIT,
)
"""Signals that are meant for the leader of a process group even if the whole group receives them."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)

_INTERRUPT = signal.SIGINT.name


def call_in_forked_children(method: Callable[[], Any]) -> None:
    """Call `method` in every later forked child, before a signal reaches the child, as long as its object lives.

    A forked child inherits the handlers and the wakeup descriptor: without this, a signal to the child would also make
    the request to stop in its parent.
    """
    reference = weakref.WeakMethod(method)
    masks: dict[int, set[Any]] = {}  # by thread, because two threads may fork at the same time

    def hold_signals() -> None:
        masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)

    def release_signals() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop(threading.get_ident()))

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()
        release_signals()

    os.register_at_fork(before=hold_signals, after_in_parent=release_signals, after_in_child=call)


def record_only(_name: str) -> None:
    """Do nothing in the handler: the program reads the request from `StopSignals`."""


def interrupt(_name: str) -> None:
    """Raise KeyboardInterrupt."""
    raise KeyboardInterrupt


class StopSignals(Closable):
    """Handles the stop signals from its construction to `close`. Outside the main thread it handles no signals.

    A signal that is ignored already, such as SIGHUP under nohup, stays ignored. A forked child has the earlier
    handlers.
    """

    def __init__(
        self, on_stop: Callable[[str], None] = record_only, on_repeat: Callable[[str], None] = interrupt
    ) -> None:
        """Install the handlers. Both callbacks run in a handler: they may raise, and must not take a lock.

        on_stop: called at the first signal, with its name ("SIGTERM"). on_repeat: the same at the second SIGINT.
        """
        self.name = ""
        """Name of the first signal; empty before any signal."""
        self._on_stop = on_stop
        self._on_repeat = on_repeat
        self._num_interrupts = 0
        self._previous: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._receive)
        call_in_forked_children(self.close)

    @property
    def is_requested(self) -> bool:
        return bool(self.name)

    def set_callbacks(self, on_stop: Callable[[str], None], on_repeat: Callable[[str], None] = interrupt) -> None:
        """Replace both callbacks. `on_stop` is called at once if a signal has arrived already."""
        self._on_stop, self._on_repeat = on_stop, on_repeat
        if self.name:
            on_stop(self.name)

    def close(self) -> None:
        """Restore the earlier handlers of the signals. Calling it again does nothing."""
        previous, self._previous = self._previous, {}
        for number, handler in previous.items():
            # None stands for a handler that was not installed from Python; it cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def ignore(self) -> None:
        """Ignore stop signals until the process ends, even while the interpreter shuts down.

        For a worker that has saved: it keeps its own exit code, although a launcher stops all other workers when the
        first one exits.
        """
        previous, self._previous = self._previous, {}
        for number in previous:
            signal.signal(number, signal.SIG_IGN)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self._num_interrupts += number == signal.SIGINT
        if not self.name:
            self.name = name
            self._on_stop(name)
        elif number == signal.SIGINT and self._num_interrupts == 2:
            self._on_repeat(name)


def stopped_by_signals() -> threading.Event:
    """Return an event that the first stop signal sets. The handlers stay installed until the program exits."""
    requested = threading.Event()

    def set_in_a_thread(_name: str) -> None:
        # Event.set takes the event's lock, which this thread may hold in Event.wait when the signal arrives
        _thread.start_new_thread(requested.set, ())

    StopSignals(set_in_a_thread, record_only)
    return requested


@contextmanager
def orderly_end() -> Iterator[None]:
    """Leave the block with an exception at the first stop signal. Only for the main thread.

    Raises: SystemExit, or KeyboardInterrupt for SIGINT.
    """
    with StopSignals(_unwind, record_only) as signals:
        try:
            yield
        finally:
            if signals.is_requested and signals.name != _INTERRUPT:
                print(f"megatrain: stopped by {signals.name}", file=sys.stderr)


def _unwind(name: str) -> None:
    if name == _INTERRUPT:
        raise KeyboardInterrupt
    raise SystemExit(128 + signal.Signals[name])
