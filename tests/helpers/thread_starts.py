"""Prevents the start of threads, as a system does that has reached its limit on threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ADDRESS_SPACE = 1 << 47
"""In bytes, of a process."""


@contextmanager
def no_thread_starts() -> Iterator[None]:
    """Let each start of a thread fail because its stack does not fit into memory. The call and the error are the
    same."""
    before = threading.stack_size(_ADDRESS_SPACE)
    try:
        yield
    finally:
        threading.stack_size(before)
