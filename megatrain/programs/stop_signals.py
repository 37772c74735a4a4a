"""The signals that ask a program to stop: one class for workers, executors, launches, servers and commands.

SIGTERM, SIGUSR1 (Slurm, before the time limit), SIGHUP and SIGINT all make the same request. The program decides what
follows: it reads the request at a time of its choice, or gets a call from the handler. A second SIGINT interrupts
the program without saving; other later signals have no effect.
"""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from megatrain.programs.forks import call_in_forked_children

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


def note_only(_name: str) -> None:
    """Do nothing in the handler: the program reads the request from `StopSignals`."""


def interrupt(_name: str) -> None:
    """Raise KeyboardInterrupt."""
    raise KeyboardInterrupt


class StopSignals:
    """Handles the stop signals from its construction to `close`. In a thread other than the main one it handles none.

    A signal that is ignored already, such as SIGHUP under nohup, stays ignored. A forked child has the earlier
    handlers.
    """

    def __init__(
        self, on_stop: Callable[[str], None] = note_only, on_insist: Callable[[str], None] = interrupt
    ) -> None:
        """Both are called in the handler, with a signal's name as SIGTERM; they may raise, and must take no lock.

        on_stop: at the first signal. on_insist: at the second SIGINT.
        """
        self.name = ""
        """Name of the first signal; empty while there was none."""
        self._on_stop = on_stop
        self._on_insist = on_insist
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

    def set_callbacks(self, on_stop: Callable[[str], None], on_insist: Callable[[str], None] = interrupt) -> None:
        """Replace both callbacks. `on_stop` is called at once if a signal has arrived already."""
        self._on_stop, self._on_insist = on_stop, on_insist
        if self.name:
            on_stop(self.name)

    def close(self) -> None:
        """Restore the earlier handlers of the signals. Calling it again does nothing."""
        previous, self._previous = self._previous, {}
        for number, handler in previous.items():
            # None stands for a handler that was not made in Python and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def ignore(self) -> None:
        """Ignore stop signals until the process ends, even while the interpreter shuts down.

        For a worker that has saved: it ends with its own exit code, although a launcher that sees the first worker end
        stops all others.
        """
        previous, self._previous = self._previous, {}
        for number in previous:
            signal.signal(number, signal.SIG_IGN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self._num_interrupts += number == signal.SIGINT
        if not self.name:
            self.name = name
            self._on_stop(name)
        elif number == signal.SIGINT and self._num_interrupts == 2:
            self._on_insist(name)


def stopped_by_signals() -> threading.Event:
    """Return an event that is set when this program is asked to stop, for the rest of its life."""
    asked = threading.Event()

    def set_in_a_thread(_name: str) -> None:
        # Event.set takes the event's lock, which this thread may hold in Event.wait when the signal arrives
        _thread.start_new_thread(asked.set, ())

    StopSignals(set_in_a_thread, note_only)
    return asked
