"""`python -m megatrain_launcher.standby CHANNEL EXECUTOR_PID [MODULE ...]`: the standby server of an executor."""

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
    """Be the standby server, and later each of its workers."""
    channel_fd, executor_pid, preload = int(arguments[0]), int(arguments[1]), arguments[2:]
    install_parent_death_guard(executor_pid)
    set_process_name("mt-standby")
    forked = _serve(socket.socket(fileno=channel_fd), executor_pid, preload)
    if forked is not None:
        become_worker(forked)


def _serve(channel: socket.socket, executor_pid: int, preload: Sequence[str]) -> Forked | None:
    os.set_inheritable(channel.fileno(), False)
    gc.disable()  # the modules are no garbage, and looking for it takes a fifth of their loading
    problems = [problem for module in preload if (problem := _import(module))]
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        problems.append(f"importing {', '.join(preload)} started threads ({names}), which workers will not have")
    # what exists now is never garbage: no collection in a worker touches it, so its memory stays shared
    gc.collect()
    gc.freeze()
    gc.enable()
    sys.stdout.flush()
    sys.stderr.flush()
    return ForkServer(channel, executor_pid).serve(problems)


def _import(module: str) -> str:
    """Import a module; return the error. Its own program will fail at it again, in its own log."""
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever a module does when it is imported)
        return f"{module} cannot be imported in advance ({type(error).__name__}: {error}); workers start slowly"
    return ""


if __name__ == "__main__":
    main(sys.argv[1:])
