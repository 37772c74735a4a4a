"""The worker's side of stack dumps. contracts/black_box/stack_dumps.py defines how a dump is requested and where it is
written.

faulthandler's handler runs in C in any state of the interpreter, and interrupted system calls continue, so it does not
affect a healthy run. Standard library only, because this is loaded before torch.
"""

from __future__ import annotations

import faulthandler
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.contracts.black_box.stack_dumps import STACKS_FILE, STACKS_SIGNAL

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
