"""What a forked child of this process must reset, before a signal reaches it."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

GROUP_SIGNALS: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGHUP,
    signal.SIGQUIT,
)
"""When they are sent to a whole process group, they are meant for its first process."""


def call_in_forked_children(method: Callable[[], Any]) -> None:
    """Call `method` in every later fork of this process while its object lives, before a signal reaches the child.

    A forked child inherits handlers and wakeup descriptor: without this, ending the child would stop its parent.
    """
    reference = weakref.WeakMethod(method)
    masks: dict[int, set[Any]] = {}  # by thread: two may fork at once

    def hold_signals() -> None:
        masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)

    def release_signals() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop(threading.get_ident()))

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()
        release_signals()

    os.register_at_fork(before=hold_signals, after_in_parent=release_signals, after_in_child=call)
