"""Stops a worker: after a signal it saves at a step on which all ranks agree; a watchdog kills it after a grace period.

A rank that waits in a collective, or in C code that holds the interpreter lock, never runs a Python signal handler. So
the watchdog is a child process, forked while the worker is still small. CPython's own C-level handler writes the number
of each signal into the watchdog's pipe (`signal.set_wakeup_fd`), whether or not the lock is held. The watchdog counts
the grace period down and kills the worker. It also kills a worker if its executor is frozen and the job may have
continued without it: see self_fence.py.
The step loops of all ranks agree on the step, and save (ADR 0007, ADR 0044).
Standard library only, because this is loaded before torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from pathlib import Path

from megatrain.contracts.closable import Closable
from megatrain.fencing.fence import FenceRule
from megatrain.programs.processes import set_parent_death_signal
from megatrain.programs.stop_signals import GROUP_SIGNALS, call_in_forked_children
from megatrain.training.stopping.watchdog_process import COMMAND, EXTEND, FOLLOW, run_watchdog

_logger = logging.getLogger(__name__)


class Watchdog(Closable):
    """The worker's handle to its watchdog process, created by `start_watchdog`."""

    def __init__(self, pid: int, pipe_fd: int) -> None:
        self.pid = pid
        self._pipe_fd = pipe_fd
        self._previous_wakeup_fd = signal.set_wakeup_fd(pipe_fd, warn_on_full_buffer=False)
        call_in_forked_children(self._disconnect)

    def extend(self, seconds: float) -> None:
        """Let the grace period begin `seconds` from now at the earliest, for a signal that has arrived or will arrive.

        The worker calls it with the timeout before a save or an evaluation, and with 0 after it. Each call replaces the
        previous one.
        """
        self._send(EXTEND, seconds)

    def follow(self, black_box: Path | None) -> None:
        """Send the watchdog the path of the worker's black box, which it reads for the self-fence and for the length of
        a step; None without a black box."""
        if black_box is not None:
            self._send(FOLLOW, 0.0, os.fsencode(black_box.absolute()))

    def close(self) -> None:
        """End the watchdog and wait until it is gone. A second call does nothing."""
        if self._pipe_fd < 0:
            return
        self._disconnect()
        # Other code may have waited for this child already; then its pid may belong to another process.
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)

    def _send(self, command: int, value: float, text: bytes = b"") -> None:
        if self._pipe_fd < 0:
            raise RuntimeError("the watchdog is closed")
        try:
            os.write(self._pipe_fd, COMMAND.pack(command, value, len(text)) + text)
        except OSError as error:
            # Training continues without its watchdog: the sender of a signal can detect that the worker still runs, and
            # kill it.
            _logger.warning(
                "watchdog process %d accepts no commands (%s): it will not end a stuck worker", self.pid, error
            )

    def _disconnect(self) -> None:
        if self._pipe_fd >= 0:
            # The order matters: a signal between the two calls must not be written to a closed or reused descriptor.
            signal.set_wakeup_fd(self._previous_wakeup_fd)
            os.close(self._pipe_fd)
            self._pipe_fd = -1


def start_watchdog(grace_s: float, rank: int, fence_rule: FenceRule | None = None) -> Watchdog:
    """Fork the process that kills this process after a stop signal, unless this process ends before.

    The kill comes `grace_s` after the signal. If the median step in the black box that the watchdog follows is longer
    than two thirds of `grace_s`, the kill comes after twice that step.
    Must be called in the main thread before torch is imported, so that the child stays small, and no lock of a library
    is copied.
    The watchdog receives the signals that have a Python handler: see StopSignals. `rank` is for messages. With
    `fence_rule` the watchdog also kills a worker if its executor is frozen and the job may have continued without it:
    see `follow`.
    """
    worker_pid = os.getpid()
    read_fd, write_fd = os.pipe()
    # The worker must never block on its watchdog.
    os.set_blocking(write_fd, False)
    # These signals are blocked until the child ignores them: before that, a signal to the group would end the child.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            run_watchdog(read_fd, worker_pid, grace_s, rank, fence_rule)
        os.close(read_fd)
        return Watchdog(pid, write_fd)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def install_launcher_death_guard(launcher_pid: int) -> None:
    """Install a parent-death guard that sends SIGTERM when the launcher dies: no process would watch the worker, and a
    new launcher starts other workers. Must be called after the signal's handler is set.

    launcher_pid: the parent at the start of the process.
    """
    set_parent_death_signal(signal.SIGTERM)
    if os.getppid() != launcher_pid:
        os.kill(os.getpid(), signal.SIGTERM)
