"""What signals mean to a launch that waits for executors: the first is handed on, a second Ctrl-C gives up on saving.

SIGTERM, SIGUSR1 (Slurm, before the time limit), SIGHUP and SIGINT all mean "save and stop"; the executors see to it
that all hosts save at the same step.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class StoppedEarly(BaseException):
    """A signal asked to stop while the launch was still being prepared. Like KeyboardInterrupt it is nobody's error."""


class EarlyStop:
    """As a context, in the main thread: until somebody else takes the signals, one that asks to stop is raised.

    Raises there: StoppedEarly, so that what is started already is ended in order. Whoever runs the job takes the
    signals meanwhile; after `job_is_over` nothing is to be stopped any more. Ctrl-C stays what it is.
    """

    def __init__(self) -> None:
        self._is_over = False
        self._asked = ""
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def job_is_over(self) -> None:
        self._is_over = True

    def check(self) -> None:
        """Raise anew what was raised where it was lost: not every import lets such through. Raises: StoppedEarly."""
        if self._asked:
            raise StoppedEarly(self._asked)

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            if number != signal.SIGINT and signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if not self._is_over and not self._asked:
            self._asked = signal.Signals(number).name
            raise StoppedEarly(self._asked)


class StopOnSignal:
    """As a context, in the main thread. `ask` is called there with the name of the first signal, as SIGTERM.

    Raises there: KeyboardInterrupt at the second SIGINT; later ones do nothing.
    """

    def __init__(self, ask: Callable[[str], None]) -> None:
        self._ask = ask
        self._num_interrupts = 0
        self._is_asked = False
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    @property
    def is_asked(self) -> bool:
        """Whether a signal came."""
        return self._is_asked

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP by nohup
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not made in Python and cannot be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._ask(signal.Signals(number).name)
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts == 2:
                raise KeyboardInterrupt
