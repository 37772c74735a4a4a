"""The signals that ask a program to stop: one class for workers, executors, launches, servers and commands.

SIGTERM, SIGUSR1 (Slurm, before the time limit), SIGHUP and SIGINT all ask for the same. What follows is the program's
own: it reads the request at a time of its choice, or gets a call from the handler. A second SIGINT insists; nothing
else that comes later changes anything.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from megatrain.programs.forks import call_in_forked_children

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


def note_only(_name: str) -> None:
    """Do nothing in the handler: the request is read from `StopSignals`."""


def interrupt(_name: str) -> None:
    """Raise KeyboardInterrupt."""
    raise KeyboardInterrupt


class StopSignals:
    """Takes the stop signals from its making to `close`. In another thread than the main one it takes none.

    What is ignored already, as SIGHUP by nohup, stays so. A forked child has the handlers of before.
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

    def tell(self, on_stop: Callable[[str], None], on_insist: Callable[[str], None] = interrupt) -> None:
        """Call these from now on, in place of those given before; `on_stop` at once if a signal has come already."""
        self._on_stop, self._on_insist = on_stop, on_insist
        if self.name:
            on_stop(self.name)

    def close(self) -> None:
        """Give the signals back to the handlers that were there before. Calling it again does nothing."""
        previous, self._previous = self._previous, {}
        for number, handler in previous.items():
            # None stands for a handler that was not made in Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def ignore(self) -> None:
        """Let stop signals do nothing until the process ends, in the interpreter's own last moments too.

        For a worker that has saved: it ends with its own exit code, although a launcher that sees the first worker go
        tells all others to stop.
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
    StopSignals(lambda _: asked.set(), note_only)
    return asked
