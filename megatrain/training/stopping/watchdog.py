"""How a worker stops: a signal asks it to save at the next agreed step, and a watchdog kills it if no such step comes.

A rank that waits in a collective, or in C code that holds the interpreter lock, never runs a Python signal handler. So
the watchdog is a child process, forked while the worker is still small. CPython's own C-level handler writes the number
of each signal into the watchdog's pipe (`signal.set_wakeup_fd`), whether or not the lock is held. The watchdog counts
the grace period down and kills the worker. It also kills a worker whose executor is frozen while the job may have gone
on without it: see self_fence.py.
The trainer agrees on the step and saves (ADR 0007, ADR 0044).
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

from megatrain.contracts.black_box.reader import BlackBoxReader
from megatrain.contracts.errors import DataError
from megatrain.fencing.fence import FenceAction, FenceRule, longer_stop_s, step_ns_of
from megatrain.programs.processes import set_parent_death_signal
from megatrain.programs.stop_signals import GROUP_SIGNALS, STOP_SIGNALS, call_in_forked_children
from megatrain.training.stopping.self_fence import SelfFence

_logger = logging.getLogger(__name__)

# The pipe carries two kinds of messages. A signal is one byte, 1 to 64, written by the C-level handler. A command is
# one of these bytes, a little-endian double, the length of a text, and the text, all in one write: a pipe never mixes
# two writes of up to PIPE_BUF bytes.
_EXTEND = 0x81
_DISARM = 0x82
_FOLLOW = 0x83
_COMMAND = struct.Struct("<BdH")

_PIPE_FD = 3
_LONGEST_WAIT_S = 3600.0  # select does not accept infinity
_POLL_S = 0.5
_NS = 1_000_000_000


class Watchdog:
    """The worker's handle of its watchdog process. `start_watchdog` makes it."""

    def __init__(self, pid: int, pipe_fd: int) -> None:
        self.pid = pid
        self._pipe_fd = pipe_fd
        self._previous_wakeup_fd = signal.set_wakeup_fd(pipe_fd, warn_on_full_buffer=False)
        call_in_forked_children(self._disconnect)

    def extend(self, seconds: float) -> None:
        """Let the grace period begin `seconds` from now at the earliest, for a signal that has arrived or will arrive.

        Call it with the timeout before a save or an evaluation, and with 0 after it. Each call replaces the one before.
        """
        self._send(_EXTEND, seconds)

    def disarm(self) -> None:
        """Forget the signals that have arrived; the next signal starts a new grace period."""
        self._send(_DISARM, 0.0)

    def follow(self, black_box: Path | None) -> None:
        """Send the watchdog the path of the worker's black box, which it reads for the self-fence and for the length of
        a step; None without a black box."""
        if black_box is not None:
            self._send(_FOLLOW, 0.0, os.fsencode(black_box.absolute()))

    def close(self) -> None:
        """End the watchdog and wait until it is gone. A second call does nothing."""
        if self._pipe_fd < 0:
            return
        self._disconnect()
        # Other code may have waited for our child already; then its pid may belong to another process.
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
            # Training continues without its watchdog: the sender of a signal sees that the worker lives on, and can
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


def start_watchdog(grace_s: float, rank: int | None = None, fence_rule: FenceRule | None = None) -> Watchdog:
    """Fork the process that kills this process after a stop signal, unless this process ends before.

    The kill comes `grace_s` after the signal. If the median step in the black box that the watchdog follows is longer
    than two thirds of that, the kill comes after twice that step.
    Call it in the main thread before torch is imported: the child stays small, and no lock of a library is copied.
    The watchdog sees the signals that have a Python handler: see StopSignals. `rank` is for the message; None means
    torchrun's rank. With `fence_rule` the watchdog also kills a worker whose executor is frozen and whose job may have
    gone on without it: see `follow`.
    """
    rank_text = os.environ.get("RANK", "0") if rank is None else str(rank)
    worker_pid = os.getpid()
    read_fd, write_fd = os.pipe()
    # The worker must never block on its watchdog.
    os.set_blocking(write_fd, False)
    # These signals are blocked until the child ignores them: before that, a signal to the group would end the child.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _run_watchdog(read_fd, worker_pid, grace_s, rank_text, fence_rule)
        os.close(read_fd)
        return Watchdog(pid, write_fd)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _run_watchdog(
    read_fd: int, worker_pid: int, grace_s: float, rank_text: str, fence_rule: FenceRule | None
) -> NoReturn:
    """Run the forked child. No Python code of the worker may continue in the child, even after an error."""
    try:
        _detach_from_worker(read_fd)
        # a parent-death guard: the end of the pipe is not enough, since a child of the worker may keep the pipe open
        set_parent_death_signal(signal.SIGKILL)
        watch = _Watch(worker_pid, grace_s, fence_rule, f"rank {rank_text} (process {worker_pid})")
        reason = watch.wait()
        # The worker is still our parent, so its pid does not belong to another process.
        if reason and os.getppid() == worker_pid:
            _write_stderr(f"megatrain: {reason}\n")
            if watch.has_fenced and os.getpgid(worker_pid) == worker_pid:
                os.killpg(worker_pid, signal.SIGKILL)
            os.kill(worker_pid, signal.SIGKILL)
        os._exit(0)
    except BaseException:  # noqa: BLE001 -- if it were raised, the worker's code would run in the child
        _write_stderr(f"megatrain: the watchdog of rank {rank_text} failed\n{traceback.format_exc()}")
        os._exit(1)


def _detach_from_worker(read_fd: int) -> None:
    """Keep the pipe and stderr, and close everything else. Those files belong to the worker, and this process would
    keep them open."""
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


def install_launcher_death_guard(launcher_pid: int) -> None:
    """Install a parent-death guard that sends SIGTERM when the launcher dies: no process would watch the worker, and a
    new launcher starts other workers. Call it after the signal's handler is set.

    launcher_pid: the parent at the start of the process.
    """
    set_parent_death_signal(signal.SIGTERM)
    if os.getppid() != launcher_pid:
        os.kill(os.getpid(), signal.SIGTERM)


class GraceClock:
    """Decides when to kill, from what arrived through the pipe. Times are seconds of one monotonic clock."""

    def __init__(self, grace_s: float) -> None:
        self.signal_name = ""
        """The name of the stop signal whose grace period runs; empty without one."""
        self.black_box: Path | None = None
        """The path of the worker's black box; None until the worker reports it."""
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
        """Process bytes from the pipe. They may end within a command."""
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
        # Every signal that has a Python handler arrives here. Only the first stop signal counts: a second one gives no
        # more time.
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
    """The main loop of the watchdog process."""

    def __init__(self, worker_pid: int, grace_s: float, fence_rule: FenceRule | None, worker: str) -> None:
        self._worker_pid = worker_pid
        self._grace_s = grace_s
        self._fence_rule = fence_rule
        self._worker = worker
        self._clock = GraceClock(grace_s)
        self._fence: SelfFence | None = None
        self._poll_at = math.inf
        self.has_fenced = False
        """Whether the worker must end because its job may have gone on without it; its process group then ends too."""

    def wait(self) -> str:
        """Return why the worker must be killed, or "" when it has ended by itself."""
        clock = self._clock
        # If the worker died before the parent-death signal was set, and one of its children keeps the pipe open, only
        # the parent's pid shows it.
        while os.getppid() == self._worker_pid:
            now = time.monotonic()
            if now >= clock.deadline and not self._lengthen_grace():
                return (
                    f"{self._worker} got {clock.signal_name}, but did not finish its step within {clock.grace_s:g} s "
                    f"(runtime.save_grace_s={self._grace_s:g}; a step longer than two thirds of it gets twice its "
                    "time); its watchdog kills it without a save"
                )
            action, reason = self._poll() if now >= self._poll_at else (FenceAction.GO_ON, "")
            if action is FenceAction.STOP:
                self.has_fenced = True
                return f"{self._worker} is ended by its watchdog: {reason}"
            if action is FenceAction.SAVE:
                self._ask_to_save(reason)
            wait_s = min(clock.deadline, self._poll_at) - time.monotonic()
            if select.select([_PIPE_FD], [], [], min(max(0.0, wait_s), _LONGEST_WAIT_S))[0]:
                data = os.read(_PIPE_FD, 4096)
                if not data:
                    return ""
                clock.feed(data, time.monotonic())
                self._begin_to_poll()
        return ""

    def _lengthen_grace(self) -> bool:
        """Lengthen the grace period if the worker's own steps need more; return whether they do."""
        step_ns = None
        if self._clock.black_box is not None:
            with contextlib.suppress(DataError), BlackBoxReader(self._clock.black_box) as reader:
                step_ns = step_ns_of(reader.progress())
        longer_s = None if step_ns is None else longer_stop_s(self._clock.grace_s, step_ns / _NS)
        self._clock.grace_s = longer_s or self._clock.grace_s
        return longer_s is not None

    def _begin_to_poll(self) -> None:
        if self._fence_rule is None or self._clock.black_box is None or self._fence is not None:
            return
        try:
            self._fence = SelfFence(self._clock.black_box, self._fence_rule)
            self._poll_at = time.monotonic() + _POLL_S
        except DataError as error:
            self._stop_polling(error)

    def _poll(self) -> tuple[FenceAction, str]:
        self._poll_at = time.monotonic() + _POLL_S
        try:
            return self._fence.poll() if self._fence is not None else (FenceAction.GO_ON, "")
        except DataError as error:
            self._stop_polling(error)
            return FenceAction.GO_ON, ""

    def _ask_to_save(self, reason: str) -> None:
        """Send the worker SIGTERM once, as a scheduler would: all ranks then agree on a step, save and stop."""
        if not self._clock.signal_name and os.getppid() == self._worker_pid:
            _write_stderr(f"megatrain: {self._worker} is asked by its watchdog to save and stop: {reason}\n")
            os.kill(self._worker_pid, signal.SIGTERM)

    def _stop_polling(self, error: DataError) -> None:
        self._fence_rule, self._poll_at = None, math.inf
        _write_stderr(f"megatrain: the watchdog of {self._worker} will not end it if the executor freezes: {error}\n")


def _write_stderr(text: str) -> None:
    # The reader may be gone, or frozen with the pipe full; neither may prevent the kill.
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode())
