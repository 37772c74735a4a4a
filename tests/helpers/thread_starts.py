"""Prevents the start of threads, as a system does that has reached its limit on threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

_ADDRESS_SPACE = 1 << 47
"""In bytes, of a process."""


@contextmanager
def no_thread_starts(after: int = 0) -> Iterator[None]:
    """Let each start of a thread fail because its stack does not fit into memory. The call and the error are the
    same. after: how many threads still start."""
    before, start, left = threading.stack_size(), threading.Thread.start, after

    def counted_start(thread: threading.Thread) -> None:
        nonlocal left
        if left <= 0:
            threading.stack_size(_ADDRESS_SPACE)
        left -= 1
        start(thread)

    try:
        with mock.patch.object(threading.Thread, "start", counted_start):
            yield
    finally:
        threading.stack_size(before)
