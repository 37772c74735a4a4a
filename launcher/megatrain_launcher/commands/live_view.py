"""`megatrain status --watch`: redraws on each change, and each second because ages are shown, until the job is over.

A watch signals changes; the whole state is then read again, so that each drawing shows one revision. If the output is
not a terminal, the state is printed only when it differs in more than steps and times (`_compared_state`).
"""

from __future__ import annotations

import select
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from megatrain.contracts.errors import CoordinationError, CoordinationRefusedError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.formatting import age_text, printable, short, time_text
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.watch import Watch
from megatrain_job.coordination.wire import KeyRange
from megatrain_job.jobs.assessment import Assessment, assess
from megatrain_job.jobs.snapshot import JobSnapshot, read_job
from megatrain_launcher.commands.status_text import status_lines

_REDRAW_S = 1.0
_MIN_PAUSE_S = 0.2
"""Pause between two reads, because the hosts of a large job write all the time."""


class LiveView:
    """Draws one job on one output. `is_all`: all hosts and reasons, as with `megatrain status --all`."""

    def __init__(
        self,
        client: EtcdClient,
        keys: JobKeys,
        *,
        is_all: bool = False,
        output: TextIO | None = None,
        now: Callable[[], float] = time.time,
        redraw_s: float = _REDRAW_S,
    ) -> None:
        self._client = client
        self._keys = keys
        self._is_all = is_all
        self._output = output or sys.stdout
        self._is_terminal = self._output.isatty()
        self._now = now
        self._redraw_s = redraw_s
        self._shown: object = None

    def run(self) -> None:
        """Draw until the job is over, or the user interrupts.

        Raises: CoordinationError, CoordinationRefusedError; BrokenPipeError when the reader is gone.
        """
        snapshot = read_job(self._client, self._keys)
        keys = KeyRange.prefix(self._keys.prefix)
        try:
            with Watch(self._client, keys, start_revision=snapshot.revision + 1) as watch:
                known_s = self._now()
                self._draw(snapshot, known_s, problem="")
                while snapshot.end is None:
                    changed = self._wait(watch)
                    problem = watch.problem
                    if changed and not problem:
                        try:
                            snapshot, known_s = read_job(self._client, self._keys), self._now()
                        except CoordinationRefusedError:
                            raise
                        except CoordinationError as error:
                            problem = str(error)
                    elif not problem:
                        known_s = self._now()
                    self._draw(snapshot, known_s, problem)
        except KeyboardInterrupt:
            if self._is_terminal:
                self._output.write("\n")

    def _wait(self, watch: Watch) -> bool:
        """Wait for a change or for the time to redraw; take simultaneous changes together."""
        if watch.next(self._redraw_s) is None:
            return False
        until_s = time.monotonic() + _MIN_PAUSE_S
        while (left_s := until_s - time.monotonic()) > 0:
            watch.next(left_s)
        return True

    def _draw(self, snapshot: JobSnapshot, known_s: float, problem: str) -> None:
        if not self._is_terminal and _has_lost_reader(self._output):
            raise BrokenPipeError  # the next change, and with it the next write, may be hours away
        now_s = self._now()
        if not snapshot.exists:
            lines: Sequence[str] = [f"job {snapshot.job!r}: etcd has no job of this name yet"]
            compared: object = lines
        else:
            answer = assess(snapshot, now_s)
            lines = status_lines(snapshot, answer, now_s, is_all=self._is_all)
            compared = _compared_state(answer)
        if problem:
            age = age_text(known_s, now_s)
            lines = [f"etcd does not answer; this is the state of {age} ago ({short(problem, 120)})", *lines]
        if self._is_terminal:
            self._redraw(lines)
        elif (compared, bool(problem)) != self._shown:
            self._output.write("\n".join(["", time_text(now_s), *map(printable, lines), ""]))
            self._output.flush()
        self._shown = (compared, bool(problem))

    def _redraw(self, lines: Sequence[str]) -> None:
        size = shutil.get_terminal_size()
        shown = [printable(line)[: size.columns] for line in lines]
        if len(shown) >= size.lines:
            shown = [*shown[: size.lines - 2], f"... {len(shown) - size.lines + 2} more lines"]
        first = "\x1b[2J" if self._shown is None else ""
        # each line is overwritten, and its rest wiped, so that nothing flickers
        self._output.write(first + "\x1b[H" + "".join(f"{line}\x1b[K\n" for line in shown) + "\x1b[J")
        self._output.flush()


def _has_lost_reader(output: TextIO) -> bool:
    """Return whether the reader of a pipe has gone."""
    try:
        number = output.fileno()
    except OSError:  # not a file, as in tests
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _compared_state(answer: Assessment) -> tuple[object, ...]:
    """Return the part of the state whose changes are printed: without steps and times, which always change."""
    hosts = tuple((view.host, view.state) for view in answer.hosts)
    return (answer.state, tuple((reason.code, reason.hosts, reason.ranks) for reason in answer.health.reasons), hosts)
