"""The end of a program that trains: its messages, its exit code, and an exit that waits for no peer.

`megatrain train` and a user's program under a launcher end alike, so that a launcher can decide by the exit code.
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
"""Errors that usually occur on all workers of a host alike: its first worker reports them."""

FIRST_WORKER_REPORTS_WITHIN_S = 5.0


def run_worker_program(train: Callable[[], ExitCode], first_worker_s: float = FIRST_WORKER_REPORTS_WITHIN_S) -> int:
    """Call `train`, report its error, and return the exit code. After an error in a process with torch: exit at once.

    first_worker_s: how long another worker than the first one of a host waits until it reports an error that usually
    all have.
    """
    try:
        code = run_and_report(lambda: _train(train, first_worker_s))
    except BaseException as error:
        if "torch" not in sys.modules:
            raise
        code = _report_unforeseen(error)
    if code not in (ExitCode.OK, ExitCode.SAVED_AND_STOPPED) and "torch" in sys.modules:
        # Exit without tearing down groups whose peers may be gone: the interpreter's normal exit would wait for their
        # threads, or abort because of them.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # the stream's reader is gone, or the stream is closed
                stream.flush()
        os._exit(code)
    return code


def _report_unforeseen(error: BaseException) -> int:
    """Print what the interpreter would have printed at its exit, and return the exit code it would have had."""
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
            # If the first worker has the same error, the launcher ends this worker before it reports the error. If this
            # worker exited at once, the launcher might end the first worker before that one reports. If this worker
            # never reported, an error that only it has would be hidden.
            time.sleep(first_worker_s)
        raise
