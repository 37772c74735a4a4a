"""How often a supervised program is started if it always fails with the same error."""

from __future__ import annotations

import re

from megatrain.contracts.exit_codes import ExitCode

NOT_STARTED = 127
"""A shell's exit code for a program that it cannot start."""
_USUAL_LIVES = 10
"""After a bug or a signal: enough to outlast a condition of minutes, such as a host short of memory."""
_LIVES_WITHOUT_STORAGE = 720
"""Half a day at one start a minute: a person has to free or mend a disk, or another host's daemon still has the lock of
the events. Training goes on meanwhile, and its diagnosis must not be lost for a night."""
_MAX_LIVES: dict[int, int | None] = {
    **dict.fromkeys((ExitCode.USAGE, ExitCode.DATA, ExitCode.NOT_FOUND, ExitCode.NO_PERMISSION, ExitCode.CONFIG), 2),
    **dict.fromkeys((ExitCode.SAVE_FAILED, NOT_STARTED), _LIVES_WITHOUT_STORAGE),
    ExitCode.COORDINATION: None,
}


def max_lives(exit_code: int) -> int | None:
    """Return how often a program is started that always fails with this code, negative for a signal; None: no limit.

    Few starts where a restart cannot help, such as a wrong configuration. No limit only without etcd: an outage may
    have any length, and a program that needs etcd at its start can do nothing but wait.
    """
    return _MAX_LIVES.get(exit_code, _USUAL_LIVES)


class RepeatedFailures:
    """Counts the failures in a row with the same error."""

    def __init__(self) -> None:
        self.number = 0
        """1 after a failure with another error than the one before, and after exit code 0."""
        self._last: tuple[int, str] | None = None

    def count(self, exit_code: int, error: str) -> bool:
        """Count a failure; return whether the limit of its exit code is reached.

        error: the last line that the program printed, in which numbers (times, process ids) may differ. It does not
        count after a signal, because a killed program does not print why it was killed.
        """
        failure = (exit_code, "" if exit_code < 0 else re.sub(r"\d+", "", error))
        self.number = self.number + 1 if exit_code and failure == self._last else 1
        self._last = failure
        limit = max_lives(exit_code)
        return bool(exit_code) and limit is not None and self.number >= limit

    def forget(self) -> None:
        """The program has worked meanwhile."""
        self.number, self._last = 0, None
