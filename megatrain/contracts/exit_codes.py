"""Exit codes of every megatrain program, and texts on how a process ended.

A launcher classifies a failure by the exit code first, because these codes are more specific than a log.

Numbers follow BSD sysexits where one fits (65, 66, 68, 69, 71, 72, 74 to 78).
"""

from __future__ import annotations

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """Why a program ended."""

    OK = 0
    FAILURE = 1
    """Any failure without a specific code: a bug or an unforeseen environment."""
    USAGE = 2
    """The command line was wrong (argparse's own number)."""
    DATA = 65
    """An input file is missing, damaged or of another kind. Restarting does not help."""
    CHECKPOINT = 66
    """No loadable checkpoint where one was expected. Restarting does not help."""
    NON_FINITE = 67
    """Too many steps in a row had a non-finite loss or gradient."""
    COORDINATION = 68
    """etcd could not be reached or refused a request, or a newer round has superseded this program.
    Restarting helps after the cause is fixed."""
    COMMUNICATION = 69
    """A peer was lost or a collective timed out. Restarting may help."""
    UNREACHABLE = 71
    """The object storage of the data did not answer, after many tries. Restarting may help, or another host."""
    NOT_FOUND = 72
    """The named object does not exist: a run, a job, a host, an incident, a verdict, a round, a step."""
    SAVE_FAILED = 74
    """A checkpoint, or the events, could not be written: a disk is full or unavailable. Restarting helps after the
    cause is fixed."""
    SAVED_AND_STOPPED = 75
    """A signal requested the stop, and a checkpoint was saved. Start again to continue."""
    REFUSED = 76
    """The job's driver refused a request; the message gives the reason."""
    NO_PERMISSION = 77
    """etcd refused the user, the password or the certificate, or a run's files belong to another user. Restarting does
    not help."""
    CONFIG = 78
    """The configuration or the layout is wrong. Restarting does not help."""


GOOD_ENDS = frozenset({ExitCode.OK, ExitCode.SAVED_AND_STOPPED})
"""The exit codes of programs that did their work, or that saved it because they were asked to stop."""


def exit_text(exit_code: int) -> str:
    """Return "by SIGKILL (9)" for a negative code (killed by a signal); else "with exit code 66 (checkpoint)"."""
    if exit_code < 0:
        try:
            return f"by {signal.Signals(-exit_code).name} ({-exit_code})"
        except ValueError:
            return f"by signal {-exit_code}"
    try:
        name = ExitCode(exit_code).name.lower().replace("_", " ")
    except ValueError:
        return f"with exit code {exit_code}"
    return f"with exit code {exit_code}" if exit_code <= ExitCode.FAILURE else f"with exit code {exit_code} ({name})"


def end_text(exit_code: int) -> str:
    """Return "was killed by SIGKILL (9)" or "ended with exit code 66 (checkpoint)"."""
    return f"was killed {exit_text(exit_code)}" if exit_code < 0 else f"ended {exit_text(exit_code)}"
