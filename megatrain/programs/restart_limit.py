"""How often a supervised program is started if it fails with the same error each time."""

from __future__ import annotations

import re

from megatrain.contracts.exit_codes import ExitCode

NOT_STARTED = 127
"""A shell's exit code for a program that it cannot start."""
_USUAL_STARTS = 10
"""The limit after a bug or a signal. The starts cover minutes, in which a lack of memory may end."""
_STARTS_WITHOUT_STORAGE = 720
"""Half a day at one start a minute. The cause may be a full or broken disk, which a person has to repair, or another
host's daemon that still has the lock of the events. Training continues, and it must not run a whole night without
diagnosis."""
_MAX_STARTS: dict[int, int | None] = {
    **dict.fromkeys((ExitCode.USAGE, ExitCode.DATA, ExitCode.NOT_FOUND, ExitCode.NO_PERMISSION, ExitCode.CONFIG), 2),
    **dict.fromkeys((ExitCode.SAVE_FAILED, NOT_STARTED), _STARTS_WITHOUT_STORAGE),
    ExitCode.COORDINATION: None,
}


def max_starts(exit_code: int) -> int | None:
    """Return the limit of starts for a program that always fails with this code, negative for a signal; None: no limit.

    The limit is 2 where a restart cannot help, as with a wrong configuration. There is no limit if etcd is not
    available: an outage may have any length, and a program that needs etcd at its start can only wait.
    """
    return _MAX_STARTS.get(exit_code, _USUAL_STARTS)


class RepeatedFailures:
    """Counts the failures in a row with the same error."""

    def __init__(self) -> None:
        self.number = 0
        """The failures in a row with the last error; 1 after exit code 0."""
        self._last: tuple[int, str] | None = None

    def count(self, exit_code: int, error: str) -> bool:
        """Count a failure; return whether the limit of its exit code is reached.

        error: the last line that the program printed, in which numbers (times, process ids) may differ. It does not
        count after a signal, because a killed program does not print why it was killed.
        """
        failure = (exit_code, "" if exit_code < 0 else re.sub(r"\d+", "", error))
        self.number = self.number + 1 if exit_code and failure == self._last else 1
        self._last = failure
        limit = max_starts(exit_code)
        return bool(exit_code) and limit is not None and self.number >= limit

    def forget(self) -> None:
        """Reset the count, because the program has worked."""
        self.number, self._last = 0, None
