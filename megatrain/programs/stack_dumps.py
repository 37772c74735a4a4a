"""How a worker provides its Python stacks to its host: on a signal, it writes the stacks to an unnamed file.

The file is in memory, and the host finds it in the worker's list of open files, so nothing is left after the worker
exits. faulthandler's handler writes the file: it runs in C in any state of the interpreter and needs no interpreter
lock, so even a rank that hangs in native code with the lock held responds. Interrupted system calls continue, so a dump
does not affect a healthy run. The diagnosis's streamer/stacks.py requests and reads. Standard library only, because
this is loaded before torch.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

STACKS_SIGNAL = signal.SIGUSR2
"""It is sent only to a process that handles it, because it would kill any other process."""
STACKS_FILE = "megatrain-stacks"
"""Name of the file; the system shows memfd:megatrain-stacks."""

_logger = logging.getLogger(__name__)


@contextmanager
def stacks_on_demand() -> Iterator[None]:
    """Make this process write the stacks of all its threads on the signal. Works only on Linux; elsewhere it warns."""
    try:
        file = os.memfd_create(STACKS_FILE)
    except (AttributeError, OSError) as error:
        _logger.warning("this worker cannot dump its stacks if it hangs: %s", error)
        yield
        return
    try:
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
        yield
    finally:
        faulthandler.unregister(STACKS_SIGNAL)
        os.close(file)
