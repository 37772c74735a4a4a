"""How a training program ends: its error messages, its exit code, and an exit that does not wait for other ranks.

Used by `megatrain train` and by programs with a `Trainer`, so that a launcher can rely on the exit code.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from megatrain.cli import run_and_report
from megatrain.contracts.errors import CheckpointError, ConfigError, DataError, NonFiniteError, TopologyError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.process import process_from_environment

_SAME_EVERYWHERE = (ConfigError, TopologyError, DataError, CheckpointError, NonFiniteError)
"""Errors that usually occur on all workers of a host: the host's first worker reports them."""

FIRST_WORKER_REPORTS_WITHIN_S = 5.0


def run_worker_program(train: Callable[[], ExitCode], first_worker_s: float = FIRST_WORKER_REPORTS_WITHIN_S) -> int:
    """Call `train`, report its error, and return the exit code. If torch is loaded, exit at once after an error.

    first_worker_s: how long the other workers of a host wait before they report an error that all workers usually have.
    """
    try:
        code = run_and_report(lambda: _train(train, first_worker_s))
    except BaseException as error:
        if "torch" not in sys.modules:
            raise
        code = _report_unexpected(error)
    if code not in (ExitCode.OK, ExitCode.SAVED_AND_STOPPED) and "torch" in sys.modules:
        # Exit without destroying process groups, because their peers may be gone: a normal exit would wait for the
        # threads of the groups, or abort because of them.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # the stream's reader is gone, or the stream is closed
                stream.flush()
        os._exit(code)
    return code


def _report_unexpected(error: BaseException) -> int:
    """Print what the interpreter would print for this error at exit, and return its exit code."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or ExitCode.OK
    with suppress(OSError, ValueError):
        if isinstance(error, SystemExit):
            print(error.code, file=sys.stderr)
        else:
            traceback.print_exception(error)
    return ExitCode.FAILURE


def _train(train: Callable[[], ExitCode], first_worker_s: float) -> int:
    try:
        return int(train())
    except _SAME_EVERYWHERE:
        if process_from_environment(os.environ).local_rank != 0:
            # Wait, so that the first worker can report the same error; the launcher then ends this worker. If this
            # worker exited at once, the launcher might end the first worker before its report. This worker must report
            # too, because the error may be its own only.
            time.sleep(first_worker_s)
        raise
