"""A thread that its program cannot do without: a failure is reported, and it restarts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from megatrain.contracts.errors import CoordinationError

_logger = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0
_WELL_S = 10.0
"""A thread that has run for so long has got over what it failed of."""


class LastingThread:
    """Calls `run` until it returns, or until `closed` is set; anew when it fails, after a pause that grows."""

    def __init__(self, name: str, run: Callable[[], None], closed: threading.Event) -> None:
        self._name = name
        self._run = run
        self._closed = closed
        self._trouble = ""
        self._well_at = 0.0
        self._thread = threading.Thread(target=self._last, name=name, daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """What it failed of last; empty where it never did, or has been well for a while since."""
        return self._trouble if time.monotonic() < self._well_at else ""

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in it."""
        return threading.current_thread() is self._thread

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    def _last(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return self._run()
            except Exception as error:  # its work stops for a moment, and that must be reported
                told = self.trouble
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) if told else _FIRST_PAUSE_S
                self._trouble = f"{self._name} failed: {_reason(error)}"
                self._well_at = time.monotonic() + pause_s + _WELL_S
                if self._trouble != told:  # once: it may fail of the same for hours
                    is_expected = isinstance(error, CoordinationError)
                    _logger.error("%s; it starts again", self._trouble, exc_info=not is_expected)
            if self._closed.wait(pause_s):
                return


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, CoordinationError) else f"{type(error).__name__}: {error}"
