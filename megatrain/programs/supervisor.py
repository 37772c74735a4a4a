"""A supervisor: starts a program again whenever it ends, because the job can be without it only for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from megatrain.contracts.exit_codes import end_text
from megatrain.programs.child_process import ChildProcess

_POLL_S = 0.2
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


def supervise(
    name: str, start: Callable[[], ChildProcess], closed: threading.Event, report: Callable[[str], None]
) -> None:
    """Keep the program that `start` starts running until `closed` is set; then end it.

    Each earlier end is reported, and the program is started again after a pause; pauses grow to a minute while it ends
    immediately. The parent-death guard ends the program when the calling thread ends.
    """
    pause_s = _FIRST_PAUSE_S
    while not closed.is_set():
        began = time.monotonic()
        ended = _run_once(start, closed)
        if closed.is_set():
            return
        pause_s = _FIRST_PAUSE_S if time.monotonic() - began > _LONGEST_PAUSE_S else pause_s
        report(f"{name} {ended}; it is started again in {pause_s:.0f} s")
        closed.wait(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)


def _run_once(start: Callable[[], ChildProcess], closed: threading.Event) -> str:
    """Run the program until it ends or must end; return how it ended."""
    try:
        process = start()
    except OSError as error:
        return f"cannot be started ({error})"
    with process:
        while process.poll() is None and not closed.wait(_POLL_S):
            pass
    return end_text(process.poll() or 0)
