"""An orderly end for a command that leaves something to clean up: the first signal unwinds it, the next do nothing.

SIGTERM, SIGUSR1 and SIGHUP end a Python program on the spot. Here they raise SystemExit with a shell's code, 128 + the
number of the signal, as SIGINT raises KeyboardInterrupt, so that every `with` and `finally` runs; a second signal would
break off just that. SIGKILL leaves no choice.
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
    """Let the block end in order when a signal asks for its end. For the main thread.

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
