"""Turns a fork of the standby server into a worker with the state of a new `python -m module`.

Left out: settings that an interpreter reads from its environment at its start (PYTHONHASHSEED, PYTHONPATH) and that
libraries read when they are loaded (OMP_NUM_THREADS) are as in the server's environment.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from types import TracebackType

from megatrain.programs.processes import set_parent_death_signal, set_process_name
from megatrain_launcher.standby.fork_server import Forked

_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)


def become_worker(forked: Forked) -> None:
    """Turn this process, fresh from the fork, into the worker; then run its module until that ends.

    Raises: SystemExit, and whatever the module raises that ends the process by a signal.
    """
    start = forked.start
    os.setpgid(0, 0)
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != forked.server_pid:
        os.kill(os.getpid(), signal.SIGKILL)
    os.dup2(forked.output, 1)
    os.dup2(forked.output, 2)
    os.close(forked.output)
    set_process_name(f"mt-rank-{start.rank}")
    _reset_signals()
    os.environ.clear()
    os.environ.update(start.environment)
    os.chdir(start.directory)
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    _renew_streams()
    _reseed()
    sys.argv = [start.module, *start.arguments]
    _run(start.module)


def _run(module: str) -> None:
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception as error:  # noqa: BLE001 (it is the program's, and this is where that ends)
        # as the interpreter does, without the frames that every worker has
        error.__traceback__ = _own_part(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _own_part(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the module's first frame on; the whole one if the module did not begin to run."""
    part = traceback
    while part is not None and part.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        part = part.tb_next
    return part or traceback


def _reset_signals() -> None:
    """Give every signal the disposition that a new interpreter gives it, whatever the launcher was started with."""
    for number in signal.valid_signals():
        if number in (signal.SIGKILL, signal.SIGSTOP):
            continue
        disposition = signal.SIG_IGN if number in _IGNORED else signal.SIG_DFL
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else disposition)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _renew_streams() -> None:
    """Open stdout and stderr again: the server's stream objects belong to its own output, and seek if that is a file.

    Line-buffered: a pipe would otherwise hold lines back until there are 8 KiB of them.
    """
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = sys.__stdout__ = open(1, "w", 1, encoding, errors, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, encoding, "backslashreplace", closefd=False)  # type: ignore[misc]  # noqa: SIM115


def _reseed() -> None:
    """Make numpy's global generator differ between workers, as in separate processes; Python's own does so by
    itself.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
