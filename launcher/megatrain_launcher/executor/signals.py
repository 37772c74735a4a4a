"""Signals to an executor: the first asks it to save and stop, a second interrupt to kill. Handlers only note them."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Stoppable(Protocol):
    """Both are called from a signal handler: they must take no lock."""

    def stop(self, reason: str) -> None: ...

    def kill(self, reason: str) -> None: ...


class StopSignals:
    """Takes the signals while it is entered, in the main thread; in another one it does nothing.

    What is ignored already, as SIGHUP by nohup, stays so.
    """

    def __init__(self) -> None:
        self._target: Stoppable | None = None
        self._first = ""
        self._num_interrupts = 0
        self._previous: dict[int, Any] = {}

    @property
    def first(self) -> str:
        """The name of the first signal; empty while there was none."""
        return self._first

    def tell(self, target: Stoppable) -> None:
        """Hand what came, and what is to come, to `target`."""
        self._target = target
        if self._first:
            target.stop(f"it got {self._first}")

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self._first = self._first or name
        self._num_interrupts += number == signal.SIGINT
        if self._target is None:
            return
        if self._num_interrupts > 1:
            self._target.kill(f"it got {name} again")
        else:
            self._target.stop(f"it got {name}")
