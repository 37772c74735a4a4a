"""An orderly end for a command that leaves something to clean up: the first signal unwinds it, the next do nothing.

SIGTERM and SIGHUP end a Python program on the spot. Here they raise SystemExit with a shell's code, 128 + the number of
the signal, as SIGINT raises KeyboardInterrupt, so that every `with` and `finally` runs; a second signal would break off
just that. What is ignored already, as SIGHUP by nohup, stays so. SIGKILL leaves no choice.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

END_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@contextmanager
def orderly_end() -> Iterator[None]:
    """Let the block end in order when a signal asks for its end. For the main thread.

    Raises: SystemExit, or KeyboardInterrupt for SIGINT.
    """
    previous = {
        number: handler for number in END_SIGNALS if (handler := signal.getsignal(number)) is not signal.SIG_IGN
    }
    received: list[signal.Signals] = []

    def end(number: int, _frame: FrameType | None) -> None:
        # Not SIG_IGN: of a signal that waits for its handler just then, Python would print an error.
        received.append(signal.Signals(number))
        if len(received) > 1:
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    try:
        for number in previous:
            signal.signal(number, end)
        yield
    finally:
        if received and received[0] is not signal.SIGINT:
            print(f"megatrain: stopped by {received[0].name}", file=sys.stderr)
        for number, handler in previous.items():
            # None stands for a handler that was not made in Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
