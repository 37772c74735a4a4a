"""Waiting for another process: for a condition, never for a fixed time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Final

PATIENCE: Final = float(os.environ.get("MEGATRAIN_TEST_PATIENCE", "1"))
"""Multiplies every deadline of the tests, on a slow machine."""
DEADLINE_S: Final = 120.0 * PATIENCE
"""Guards against hangs only. Durations depend on the machine, which other programs use too."""
PAUSES_S: Final = (0.02, 0.1)
"""The pauses between two checks: the first and the longest one. Slow conditions are checked less often."""
_GROWTH = 1.2


class DeadlineError(TimeoutError):
    """The awaited condition was not met before the deadline. `tests.run` repeats such a test once."""


def wait_until(
    is_met: Callable[[], bool],
    what: str,
    deadline_s: float = DEADLINE_S,
    *,
    pauses_s: tuple[float, float] = PAUSES_S,
) -> None:
    """Return as soon as the condition is met. Raises: DeadlineError naming `what` if the deadline passes before."""
    deadline = time.monotonic() + deadline_s
    pause_s, longest_s = pauses_s
    never = threading.Event()
    while not is_met():
        if time.monotonic() > deadline:
            raise DeadlineError(f"waited {deadline_s:g} s for {what}")
        never.wait(pause_s)
        pause_s = min(_GROWTH * pause_s, longest_s)
