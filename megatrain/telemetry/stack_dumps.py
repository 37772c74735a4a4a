"""The worker's end of stack dumps: contracts/stack_dumps.py tells how they are asked for and where they are found.

faulthandler's handler runs in C whatever the interpreter does, and interrupted system calls go on: a healthy run does
not notice. Standard library only, because this is loaded before torch.
"""

from __future__ import annotations

import faulthandler
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.contracts.stack_dumps import STACKS_FILE, STACKS_SIGNAL

_logger = logging.getLogger(__name__)


@contextmanager
def stacks_on_demand() -> Iterator[None]:
    """Let this process write the stacks of all its threads whenever the signal comes; only Linux can."""
    try:
        file = os.memfd_create(STACKS_FILE)
    except (AttributeError, OSError) as error:
        _logger.warning("no stack dumps of this worker, should it hang: %s", error)
        yield
        return
    try:
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
        yield
    finally:
        faulthandler.unregister(STACKS_SIGNAL)
        os.close(file)
