"""A supervisor: restarts a program whenever it exits. For programs that a job needs, but not at every moment.

If a program fails twice in a row with the same error, `problem` describes the error until the program works. The number
of restarts after the same error is limited (restart_limit.py). A kill that the program's work explains is no failure.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatrain.contracts.exit_codes import end_text
from megatrain.contracts.pauses import growing_pauses
from megatrain.programs.child_process import ChildProcess
from megatrain.programs.restart_limit import NOT_STARTED, RepeatedFailures

_POLL_S = 0.2
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_END_BYTES = 4096
_MAX_SHOWN = 300


@dataclass(frozen=True, slots=True)
class WorkAtEnd:
    """The work that explains why a program was killed. text: describes it in a message. num_ends: how many exits in a
    row work has explained without finishing. is_last: this number has reached its limit."""

    text: str
    num_ends: int
    is_last: bool


class Supervisor:
    """Keeps a program running. `run` needs its own thread: the parent-death guard kills the program with the thread."""

    def __init__(
        self,
        name: str,
        start: Callable[[Path], ChildProcess],
        log: Path,
        report: Callable[[str], None],
        work_at: Callable[[int, str], WorkAtEnd | None] = lambda code, ended: None,
    ) -> None:
        """start: starts the program, which appends output to the given log. report: receives a message at each exit.

        work_at: receives the exit code of each exit, negative for a signal, and a text about it. Returns the work that
        explains it, so that the next start gets past it: the program is started at once, and the exit does not count as
        a failure, unless it is the last one. None: nothing explains it.
        """
        self._name = name
        self._start = start
        self._log = log
        self._report = report
        self._work_at = work_at
        self._problem = ""

    @property
    def problem(self) -> str:
        """Why the program fails repeatedly, or at which work it was killed last; empty if neither is known."""
        return self._problem

    def run(self, closed: threading.Event) -> None:
        """Start the program, and restart it after each exit, until `closed` is set or the restarts are used up.

        While the program exits soon after its start, the pause before a restart grows up to a minute.
        """
        pauses, failures = growing_pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), RepeatedFailures()
        while not closed.is_set():
            began = time.monotonic()
            code, ended = self._run_once(closed)
            if closed.is_set():
                return
            if time.monotonic() - began > _LONGEST_PAUSE_S:
                pauses = growing_pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
                failures.forget()
            work = self._work_at(code, ended)
            if work is not None and not work.is_last:
                self._problem = f"{self._name} {ended} at {work.text}; see {self._log}"
                pauses = growing_pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
                failures.forget()
                self._report(f"{self._name} {ended} at {work.text}; it is started again; see {self._log}")
                continue
            line = last_line(self._log)
            summary, self._problem = f"{self._name} {ended}", ""
            if work is not None:
                is_last = is_shown = True
                summary = f"{self._name} has ended {work.num_ends} times without a result: it {ended} at {work.text}"
            else:
                is_last = failures.count(code, f"{ended}: {line}")
                is_shown = failures.number == 2
                if failures.number > 1:
                    summary = f"{self._name} has failed {failures.number} times with the same error: it {ended}"
            if work is not None or failures.number > 1:
                self._problem = f"{summary}; {line}; see {self._log}" if line else f"{summary}; see {self._log}"
            shown = f": {line}" if line and is_shown else ""
            if is_last:
                self._report(f"{summary}{shown}; it is not started again: fix the cause, then launch the job again;"
                             f" see {self._log}")  # fmt: skip
                return
            pause_s = next(pauses)
            self._report(f"{summary}{shown}; it is started again in {pause_s:.0f} s; see {self._log}")
            closed.wait(pause_s)

    def _run_once(self, closed: threading.Event) -> tuple[int, str]:
        """Run the program until it exits or `closed` is set; return its exit code and a text about its exit."""
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            process = self._start(self._log)
        except OSError as error:
            return NOT_STARTED, f"cannot be started ({error})"
        began = time.monotonic()
        with process:
            while process.poll() is None and not closed.wait(_POLL_S):
                if self._problem and time.monotonic() - began > _LONGEST_PAUSE_S:
                    self._problem = ""
        code = process.poll() or 0
        return code, end_text(code)


def last_line(log: Path) -> str:
    """Return the last line of a log that is not blank, shortened; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:_MAX_SHOWN] for line in reversed(lines) if line.strip()), "")
