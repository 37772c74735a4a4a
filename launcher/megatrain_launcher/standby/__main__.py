"""`python -m megatrain_launcher.standby CHANNEL EXECUTOR_PID STORE [MODULE ...]`: the standby server of an executor.

CHANNEL and STORE are file descriptors: the socket to the executor, and the socket on which the host's store listens, or
`none`.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
import threading
from collections.abc import Sequence

from megatrain.programs.processes import install_parent_death_guard, set_process_name
from megatrain_launcher.standby.fork_server import Forked, ForkServer
from megatrain_launcher.standby.worker_process import become_worker


def main(arguments: Sequence[str]) -> None:
    """Run the standby server. Each forked worker returns from the server's loop and continues here."""
    channel_fd, executor_pid, store_fd, preload = int(arguments[0]), int(arguments[1]), arguments[2], arguments[3:]
    install_parent_death_guard(executor_pid)
    set_process_name("mt-standby")
    listener = None if store_fd == "none" else socket.socket(fileno=int(store_fd))
    forked = _serve(socket.socket(fileno=channel_fd), executor_pid, listener, preload)
    if forked is not None:
        become_worker(forked)


def _serve(
    channel: socket.socket, executor_pid: int, listener: socket.socket | None, preload: Sequence[str]
) -> Forked | None:
    os.set_inheritable(channel.fileno(), False)
    gc.disable()  # modules are never garbage, and collections would take a fifth of the import time
    problems: list[str] = []
    store_pid = None if listener is None else _fork_store(channel, listener, problems)
    problems += [problem for module in preload if (problem := _import(module))]
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        problems.append(f"importing {', '.join(preload)} started threads ({names}), which workers will not have")
    # exclude all current objects from collections in workers, so that their memory stays shared
    gc.collect()
    gc.freeze()
    gc.enable()
    sys.stdout.flush()
    sys.stderr.flush()
    return ForkServer(channel, executor_pid, store_pid).serve(problems)


def _fork_store(channel: socket.socket, listener: socket.socket, problems: list[str]) -> int | None:
    """Fork the process that serves the store, and return its pid; None if torch cannot be imported."""
    problem = _import("megatrain_launcher.standby.store_process")
    if problem:
        problems.append(problem)
        listener.close()  # the executor's copy stays open for the next server
        return None
    from megatrain_launcher.standby.store_process import answer_at_store

    server_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        channel.close()
        answer_at_store(listener, server_pid)
    listener.close()
    return pid


def _import(module: str) -> str:
    """Import a module; return the error, empty if it was imported. Workers report the same error in their logs."""
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (an import may raise any error)
        return f"{module} cannot be imported in advance ({type(error).__name__}: {error}), so workers start slowly"
    return ""


if __name__ == "__main__":
    main(sys.argv[1:])
