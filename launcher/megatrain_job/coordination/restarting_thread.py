"""A thread that reports a failure of its work, and then starts the work again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.pauses import growing_pauses

_logger = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0
_WELL_S = 10.0
"""After this long without a failure, an earlier failure counts as overcome."""


class RestartingThread:
    """Calls `run`. After a failure and a growing pause it calls `run` again, until `run` returns or `closed` is set."""

    def __init__(self, name: str, run: Callable[[], None], closed: threading.Event) -> None:
        self._name = name
        self._run = run
        self._closed = closed
        self._problem = ""
        self._well_at = 0.0
        self._thread = threading.Thread(target=self._run_until_closed, name=name, daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str:
        """The last failure; empty if there was none, or it was overcome."""
        return self._problem if time.monotonic() < self._well_at else ""

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    def _run_until_closed(self) -> None:
        pauses = growing_pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            try:
                return self._run()
            except Exception as error:  # the failure is reported, because it interrupts the work
                earlier_problem = self.problem
                if not earlier_problem:
                    pauses = growing_pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
                pause_s = next(pauses)
                self._problem = f"{self._name} failed: {_reason(error)}"
                self._well_at = time.monotonic() + pause_s + _WELL_S
                if self._problem != earlier_problem:  # log it once: the same failure may repeat for hours
                    is_expected = isinstance(error, CoordinationError)
                    _logger.error("%s; it starts again", self._problem, exc_info=not is_expected)
            if self._closed.wait(pause_s):
                return


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, CoordinationError) else f"{type(error).__name__}: {error}"
