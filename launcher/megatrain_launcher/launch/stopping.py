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


class StopOnSignal:
    """As a context, in the main thread. `ask` is called there with the name of the first signal, as SIGTERM.

    Raises there: KeyboardInterrupt at the second SIGINT; later ones do nothing.
    """

    def __init__(self, ask: Callable[[str], None]) -> None:
        self._ask = ask
        self._num_interrupts = 0
        self._is_asked = False
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

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
