"""The process that answers at a host's store. The standby server forks it when torch is imported: that costs no import.

It is a process of its own, because the store answers in threads, and a process that forks workers must have one thread
only. It ends with the standby server.
"""

from __future__ import annotations

import signal
import socket
from datetime import timedelta
from typing import Final, NoReturn

from torch.distributed import TCPStore

from megatrain.programs.processes import install_parent_death_guard, set_process_name

_TIMEOUT: Final = timedelta(seconds=60)


def answer_at_store(listener: socket.socket, server_pid: int) -> NoReturn:
    """Answer at this listening socket until the standby server is gone."""
    install_parent_death_guard(server_pid)
    set_process_name("mt-store")
    # a signal that stops a launch is for the executor; this process ends when the executor needs no store any more
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    address, port = listener.getsockname()[:2]
    _keep_open(
        TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT, master_listen_fd=listener.detach()
        )
    )


def _keep_open(_store: TCPStore) -> NoReturn:
    """Wait for ever: a store answers until its object is gone."""
    while True:
        signal.pause()
