"""How a worker stops: a signal asks it to save at the next agreed step; a watchdog ends it when no such step comes.

A rank that waits in a collective, or in C code that holds the interpreter lock, never runs a Python signal handler. So
the watchdog is a child process, forked while the worker is still small. CPython's own C-level handler writes the number
of each signal into the watchdog's pipe (`signal.set_wakeup_fd`), lock or no lock; the watchdog counts the grace period
down and kills. It also ends a worker whose executor is frozen while its job may have gone on: see self_fence.py.
Source: DESIGN decisions 11 and 12. Left out: agreeing on the step and saving, which is the trainer's part.
Standard library only, because this is loaded before torch.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import struct
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from megatrain.contracts.black_box import BlackBoxReader
from megatrain.contracts.errors import DataError
from megatrain.failures.fence import FenceRule, FenceStep, longer_stop_s, step_ns_of
from megatrain.programs.forks import GROUP_SIGNALS, call_in_forked_children
from megatrain.programs.processes import signal_at_parents_death
from megatrain.programs.stop_signals import STOP_SIGNALS
from megatrain.self_fence import SelfFence

_logger = logging.getLogger(__name__)

# The pipe carries two kinds of messages. A signal is one byte, 1 to 64, written by the C-level handler. A command is
# one of these bytes, a little-endian double and the length of a text that follows, written at once: a pipe never mixes
# two writes of up to PIPE_BUF bytes.
_EXTEND = 0x81
_DISARM = 0x82
_FOLLOW = 0x83
_COMMAND = struct.Struct("<BdH")

_PIPE_FD = 3
_LONGEST_WAIT_S = 3600.0  # select takes no infinity
_LOOK_S = 0.5
_NS = 1_000_000_000


class Watchdog:
    """The worker's end of its watchdog process. Made by `start_watchdog`."""

    def __init__(self, pid: int, pipe_fd: int) -> None:
        self.pid = pid
        self._pipe_fd = pipe_fd
        self._previous_wakeup_fd = signal.set_wakeup_fd(pipe_fd, warn_on_full_buffer=False)
        call_in_forked_children(self._disconnect)

    def extend(self, seconds: float) -> None:
        """Let the grace period begin `seconds` from now at the earliest, for a signal that has come or will come.

        Before a save or an evaluation: with its timeout; after it: with 0. Each call replaces the one before.
        """
        self._send(_EXTEND, seconds)

    def disarm(self) -> None:
        """Forget the signals that have come; the next one starts a grace period anew."""
        self._send(_DISARM, 0.0)

    def follow(self, black_box: Path | None) -> None:
        """Tell where the worker's black box is, for the look whether it must end itself; None where there is none."""
        if black_box is not None:
            self._send(_FOLLOW, 0.0, os.fsencode(black_box.absolute()))

    def close(self) -> None:
        """End the watchdog and wait until it is gone. Calling it again does nothing."""
        if self._pipe_fd < 0:
            return
        self._disconnect()
        # Somebody else may have collected our child; then its number is no longer ours to kill.
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _send(self, command: int, value: float, text: bytes = b"") -> None:
        if self._pipe_fd < 0:
            raise RuntimeError("the watchdog is closed")
        try:
            os.write(self._pipe_fd, _COMMAND.pack(command, value, len(text)) + text)
        except OSError as error:
            # Training is worth more than its watchdog; whoever signals will see the worker live on and can kill it.
            _logger.warning("watchdog process %d does not listen (%s): nothing ends a stuck worker", self.pid, error)

    def _disconnect(self) -> None:
        if self._pipe_fd >= 0:
            # In this order: a signal between the two must not be written to a closed or reused descriptor.
            signal.set_wakeup_fd(self._previous_wakeup_fd)
            os.close(self._pipe_fd)
            self._pipe_fd = -1


def start_watchdog(grace_s: float, rank: int | None = None, fence_rule: FenceRule | None = None) -> Watchdog:
    """Fork the process that kills this one after a stop signal, unless this one has ended before: `grace_s` later, or
    twice a step of the black box that it follows, where that is longer.

    Call it in the main thread before torch is imported: the child stays small, and no lock of a library is copied.
    It notices those signals that have a Python handler: see StopSignals. `rank` is for the message; None: torchrun's.
    With `fence_rule` it also ends a worker whose job may have gone on without it, should its executor be frozen: see
    `follow`.
    """
    rank_text = os.environ.get("RANK", "0") if rank is None else str(rank)
    worker_pid = os.getpid()
    read_fd, write_fd = os.pipe()
    # The worker must never wait for its watchdog.
    os.set_blocking(write_fd, False)
    # Held back until the child ignores them: a signal to the group must not catch it unprepared.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _be_watchdog(read_fd, worker_pid, grace_s, rank_text, fence_rule)
        os.close(read_fd)
        return Watchdog(pid, write_fd)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _be_watchdog(
    read_fd: int, worker_pid: int, grace_s: float, rank_text: str, fence_rule: FenceRule | None
) -> NoReturn:
    """Run the forked child. None of the worker's Python code may continue in here, whatever happens."""
    try:
        _leave_the_worker_behind(read_fd)
        # the pipe does not end while a child of the worker holds it open
        signal_at_parents_death(signal.SIGKILL)
        watch = _Watch(worker_pid, grace_s, fence_rule, f"rank {rank_text} (process {worker_pid})")
        reason = watch.wait()
        # Still our parent, so its number has not passed to another process.
        if reason and os.getppid() == worker_pid:
            _write_stderr(f"megatrain: {reason}\n")
            if watch.has_fenced and os.getpgid(worker_pid) == worker_pid:
                os.killpg(worker_pid, signal.SIGKILL)
            os.kill(worker_pid, signal.SIGKILL)
        os._exit(0)
    except BaseException:  # noqa: BLE001 -- raised on, it would run the worker's code in the child
        _write_stderr(f"megatrain: the watchdog of rank {rank_text} failed\n{traceback.format_exc()}")
        os._exit(1)


def _leave_the_worker_behind(read_fd: int) -> None:
    """Keep the pipe and stderr; everything else that is open belongs to the worker, and would be held open by us."""
    signal.set_wakeup_fd(-1)
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    if read_fd != _PIPE_FD:
        os.dup2(read_fd, _PIPE_FD)
    null_fd = os.open(os.devnull, os.O_RDWR)
    os.dup2(null_fd, 0)
    os.dup2(null_fd, 1)
    for name in os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"):
        if int(name) > _PIPE_FD:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
                os.close(int(name))


def stop_with_launcher(launcher_pid: int) -> None:
    """Ask Linux for SIGTERM when the launcher dies: no process would watch its workers, and a new launcher starts
    others. Call it when the signal has its handler; `launcher_pid` is the parent as of the process's first moments.
    """
    signal_at_parents_death(signal.SIGTERM)
    if os.getppid() != launcher_pid:
        os.kill(os.getpid(), signal.SIGTERM)


class GraceClock:
    """When to kill, given what came through the pipe. Times are seconds of one monotonic clock."""

    def __init__(self, grace_s: float) -> None:
        self.signal_name = ""
        """Of the stop signal whose grace period runs; empty: none."""
        self.black_box: Path | None = None
        """Of the worker; None: not reported yet."""
        self.grace_s = grace_s
        self._signalled_at = 0.0
        self._busy_until = -math.inf
        self._rest = b""

    @property
    def deadline(self) -> float:
        if not self.signal_name:
            return math.inf
        return max(self._signalled_at, self._busy_until) + self.grace_s

    def feed(self, data: bytes, now: float) -> None:
        """Take in bytes of the pipe, which may end within a command."""
        data = self._rest + data
        position = 0
        while position < len(data):
            if data[position] < _EXTEND:
                self._take_signal(data[position], now)
                position += 1
                continue
            if position + _COMMAND.size > len(data):
                break
            command, value, num_bytes = _COMMAND.unpack_from(data, position)
            end = position + _COMMAND.size + num_bytes
            if end > len(data):
                break
            self._take_command(command, value, data[end - num_bytes : end], now)
            position = end
        self._rest = data[position:]

    def _take_signal(self, number: int, now: float) -> None:
        # Every signal that has a Python handler comes here. Only the first of ours counts: asking again gains no time.
        if number in STOP_SIGNALS and not self.signal_name:
            self.signal_name = signal.Signals(number).name
            self._signalled_at = now

    def _take_command(self, command: int, value: float, text: bytes, now: float) -> None:
        if command == _EXTEND:
            self._busy_until = now + value
        elif command == _FOLLOW:
            self.black_box = Path(os.fsdecode(text))
        else:
            self.signal_name = ""


class _Watch:
    """What the watchdog process does all its life."""

    def __init__(self, worker_pid: int, grace_s: float, fence_rule: FenceRule | None, worker: str) -> None:
        self._worker_pid = worker_pid
        self._grace_s = grace_s
        self._fence_rule = fence_rule
        self._worker = worker
        self._clock = GraceClock(grace_s)
        self._fence: SelfFence | None = None
        self._look_at = math.inf
        self.has_fenced = False
        """Whether the worker must go because its job may have gone on without it: so must all that it started."""

    def wait(self) -> str:
        """Return why the worker must be killed, or "" when it has gone by itself."""
        clock = self._clock
        # Had the worker died before prctl, and a child of its kept the pipe open, nothing else would tell us.
        while os.getppid() == self._worker_pid:
            now = time.monotonic()
            if now >= clock.deadline and not self._lengthen_grace():
                return (
                    f"{self._worker} got {clock.signal_name}, but came to no step boundary within {clock.grace_s:g} s "
                    f"(runtime.save_grace_s={self._grace_s:g}, or twice a step where that is longer); killing it "
                    "without a save"
                )
            step, reason = self._look() if now >= self._look_at else (FenceStep.GO_ON, "")
            if step is FenceStep.STOP:
                self.has_fenced = True
                return f"{self._worker} is ended by its watchdog: {reason}"
            if step is FenceStep.SAVE:
                self._ask_to_save(reason)
            wait_s = min(clock.deadline, self._look_at) - time.monotonic()
            if select.select([_PIPE_FD], [], [], min(max(0.0, wait_s), _LONGEST_WAIT_S))[0]:
                data = os.read(_PIPE_FD, 4096)
                if not data:
                    return ""
                clock.feed(data, time.monotonic())
                self._begin_to_look()
        return ""

    def _lengthen_grace(self) -> bool:
        """Give the worker as long as its own steps take, where that is more than it was given; say whether it is."""
        step_ns = None
        if self._clock.black_box is not None:
            with contextlib.suppress(DataError), BlackBoxReader(self._clock.black_box) as reader:
                step_ns = step_ns_of(reader.progress())
        longer_s = None if step_ns is None else longer_stop_s(self._clock.grace_s, step_ns / _NS)
        self._clock.grace_s = longer_s or self._clock.grace_s
        return longer_s is not None

    def _begin_to_look(self) -> None:
        if self._fence_rule is None or self._clock.black_box is None or self._fence is not None:
            return
        try:
            self._fence = SelfFence(self._clock.black_box, self._fence_rule)
            self._look_at = time.monotonic() + _LOOK_S
        except DataError as error:
            self._stop_looking(error)

    def _look(self) -> tuple[FenceStep, str]:
        self._look_at = time.monotonic() + _LOOK_S
        try:
            return self._fence.look() if self._fence is not None else (FenceStep.GO_ON, "")
        except DataError as error:
            self._stop_looking(error)
            return FenceStep.GO_ON, ""

    def _ask_to_save(self, reason: str) -> None:
        """Send the worker, once, the signal that a scheduler would send: all ranks agree on a step, save and stop."""
        if not self._clock.signal_name and os.getppid() == self._worker_pid:
            _write_stderr(f"megatrain: {self._worker} is asked by its watchdog to save and stop: {reason}\n")
            os.kill(self._worker_pid, signal.SIGTERM)

    def _stop_looking(self, error: DataError) -> None:
        self._fence_rule, self._look_at = None, math.inf
        _write_stderr(f"megatrain: {self._worker} would not be ended by its watchdog if its executor froze: {error}\n")


def _write_stderr(text: str) -> None:
    # The reader may be gone, or frozen with the pipe full: neither may keep the kill from happening.
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode())
