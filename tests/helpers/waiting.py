"""Waiting for what another process does: on a condition, with a deadline, never for a stated time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

PATIENCE = float(os.environ.get("MEGATRAIN_TEST_PATIENCE", "1"))

DEADLINE_S = 60.0 * PATIENCE


class DeadlineError(TimeoutError):
    pass


_POLL_S = 0.02


def wait_until(is_met: Callable[[], bool], what: str) -> None:
    """Return as soon as the condition is met. Raises: TimeoutError naming `what` when the deadline passes before."""
    deadline = time.monotonic() + deadline_s
    never = threading.Event()
    while not is_met():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {deadline_s} s for {what}")
        never.wait(_POLL_S)
