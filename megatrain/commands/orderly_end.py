"""An orderly end for a command that has to clean up: the first signal unwinds it, later signals do nothing.

SIGTERM, SIGUSR1 and SIGHUP end a Python program immediately by default. Here they raise SystemExit with a shell's code,
128 + the number of the signal, as SIGINT raises KeyboardInterrupt, so that every `with` and `finally` runs. A second
signal would interrupt that cleanup, so it is ignored. SIGKILL cannot be caught.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.programs.stop_signals import StopSignals, note_only

_INTERRUPT = signal.SIGINT.name


@contextmanager
def orderly_end() -> Iterator[None]:
    """End the block in an orderly way on a signal. Only for the main thread.

    Raises: SystemExit, or KeyboardInterrupt for SIGINT.
    """
    with StopSignals(_unwind, note_only) as signals:
        try:
            yield
        finally:
            if signals.is_requested and signals.name != _INTERRUPT:
                print(f"megatrain: stopped by {signals.name}", file=sys.stderr)


def _unwind(name: str) -> None:
    if name == _INTERRUPT:
        raise KeyboardInterrupt
    raise SystemExit(128 + signal.Signals[name])
