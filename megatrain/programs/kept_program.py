"""A program that is started again whenever it ends, because the job can do without it only for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from megatrain.contracts.exit_codes import end_text
from megatrain.programs.child_process import ChildProcess

_LOOK_S = 0.2
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


def keep_running(
    name: str, start: Callable[[], ChildProcess], closed: threading.Event, tell: Callable[[str], None]
) -> None:
    """Have the program of `start` run until `closed` is set, and end it then.

    Each earlier end is reported, and after a pause it is started again; pauses grow to a minute while it ends at
    once. The kernel ends the program with the thread that calls this.
    """
    pause_s = _FIRST_PAUSE_S
    while not closed.is_set():
        began = time.monotonic()
        ended = _run_once(start, closed)
        if closed.is_set():
            return
        pause_s = _FIRST_PAUSE_S if time.monotonic() - began > _LONGEST_PAUSE_S else pause_s
        tell(f"{name} {ended}; it is started again in {pause_s:.0f} s")
        closed.wait(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)


def _run_once(start: Callable[[], ChildProcess], closed: threading.Event) -> str:
    """Have the program run until it ends or is to end; return how it ended."""
    try:
        process = start()
    except OSError as error:
        return f"cannot be started ({error})"
    with process:
        while process.poll() is None and not closed.wait(_LOOK_S):
            pass
    return end_text(process.poll() or 0)
