"""Turns a fork of the standby server into a worker with the state of a new `python -m module`.

Exception: variables that the interpreter reads at its start (PYTHONHASHSEED, PYTHONPATH) or that libraries read when
they are loaded (OMP_NUM_THREADS) take effect with their values in the server's environment.
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
    """Turn this newly forked process into the worker, and run its module.

    Raises: SystemExit with the exit code, or a BaseException of the module, such as KeyboardInterrupt.
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
    except Exception as error:  # noqa: BLE001 (any error of the module ends the worker here)
        # print the traceback like the interpreter, but without the frames of the standby server
        error.__traceback__ = _own_part(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _own_part(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of the traceback that begins in the module; all of it if the module has not begun to run."""
    part = traceback
    while part is not None and part.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        part = part.tb_next
    return part or traceback


def _reset_signals() -> None:
    """Reset every signal to the disposition that a new interpreter gives it.

    An ignored signal stays ignored, as in a new interpreter; for example, SIGHUP under nohup.
    """
    for number in signal.valid_signals():
        if number in (signal.SIGKILL, signal.SIGSTOP) or signal.getsignal(number) is signal.SIG_IGN:
            continue
        disposition = signal.SIG_IGN if number in _IGNORED else signal.SIG_DFL
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else disposition)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _renew_streams() -> None:
    """Open stdout and stderr again, because the server's stream objects belong to the server's output.

    They are line-buffered; otherwise a pipe would get output only in blocks of 8 KiB.
    """
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = sys.__stdout__ = open(1, "w", 1, encoding, errors, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, encoding, "backslashreplace", closefd=False)  # type: ignore[misc]  # noqa: SIM115


def _reseed() -> None:
    """Reseed numpy's global generator, so that workers differ. Python reseeds its own generator after a fork."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
