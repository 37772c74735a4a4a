"""The process that serves a host's store. The standby server forks it once torch is imported.

The store runs threads, so it needs a separate process: the process that forks workers must have only one thread. The
store's process exits with the standby server.
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
    """Serve the store on this listening socket until the standby server is gone."""
    install_parent_death_guard(server_pid)
    set_process_name("mt-store")
    # ignore the signals that stop a launch: the executor handles them, and needs the store until it exits
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    address, port = listener.getsockname()[:2]
    _keep_open(
        TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT, master_listen_fd=listener.detach()
        )
    )


def _keep_open(_store: TCPStore) -> NoReturn:
    """Wait forever: the store serves as long as its object exists."""
    while True:
        signal.pause()
