"""A thread that the executor cannot do without: a mistake in it is told in the log, and it begins anew."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_logger = logging.getLogger(__name__)
_AGAIN_S = 1.0


class LastingThread:
    """Calls `run` until it returns, or until `closed` is set; anew when it fails."""

    def __init__(self, name: str, run: Callable[[], None], closed: threading.Event) -> None:
        self._name = name
        self._run = run
        self._closed = closed
        self._trouble = ""
        self._thread = threading.Thread(target=self._last, name=name, daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """What it failed of last; empty where it never did."""
        return self._trouble

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    def _last(self) -> None:
        while True:
            try:
                return self._run()
            except Exception as error:  # training goes on without this thread for a moment, and somebody must be told
                self._trouble = f"{self._name} failed: {type(error).__name__}: {error}"
                _logger.exception("%s of this executor failed; it begins anew", self._name)
            if self._closed.wait(_AGAIN_S):
                return
