"""The process of a watchdog: it counts down the grace period after a stop signal, and kills the worker at its end.

It also kills a worker if its executor is frozen and the job may have continued without it: see self_fence.py. Standard
library only, because the worker loads this before torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from megatrain.contracts.black_box.reader import BlackBoxReader
from megatrain.contracts.errors import DataError
from megatrain.fencing.fence import FenceAction, FenceRule, longer_stop_s, step_ns_of
from megatrain.programs.processes import set_parent_death_signal
from megatrain.programs.stop_signals import GROUP_SIGNALS, STOP_SIGNALS
from megatrain.training.stopping.self_fence import SelfFence

# The pipe carries two kinds of messages. A signal is one byte, 1 to 64, written by the C-level handler. A command is
# one of these bytes, a little-endian double, the length of a text, and the text, all in one write: a pipe never mixes
# two writes of up to PIPE_BUF bytes.
EXTEND = 0x81
FOLLOW = 0x82
COMMAND = struct.Struct("<BdH")

_PIPE_FD = 3
_LONGEST_WAIT_S = 3600.0  # select does not accept infinity
_POLL_S = 0.5
_NS = 1_000_000_000


def run_watchdog(read_fd: int, worker_pid: int, grace_s: float, rank: int, fence_rule: FenceRule | None) -> NoReturn:
    """Run the forked child. No Python code of the worker may continue in the child, even after an error."""
    try:
        _detach_from_worker(read_fd)
        # a parent-death guard: the end of the pipe is not enough, since a child of the worker may keep the pipe open
        set_parent_death_signal(signal.SIGKILL)
        watch = _Watch(worker_pid, grace_s, fence_rule, f"rank {rank} (process {worker_pid})")
        reason = watch.wait()
        # The worker is still the parent, so its pid does not belong to another process.
        if reason and os.getppid() == worker_pid:
            _write_stderr(f"megatrain: {reason}\n")
            if watch.has_fenced and os.getpgid(worker_pid) == worker_pid:
                os.killpg(worker_pid, signal.SIGKILL)
            os.kill(worker_pid, signal.SIGKILL)
        os._exit(0)
    except BaseException:  # noqa: BLE001 -- if it were raised, the worker's code would run in the child
        _write_stderr(f"megatrain: the watchdog of rank {rank} failed\n{traceback.format_exc()}")
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


class GraceClock:
    """Determines when to kill, from the messages in the pipe. Times are seconds of one monotonic clock."""

    def __init__(self, grace_s: float) -> None:
        self.signal_name = ""
        """The name of the stop signal whose grace period runs; empty without one."""
        self.black_box: Path | None = None
        """The path of the worker's black box; None until the worker reports it."""
        self.grace_s = grace_s
        self._signaled_at = 0.0
        self._busy_until = -math.inf
        self._rest = b""

    @property
    def deadline(self) -> float:
        if not self.signal_name:
            return math.inf
        return max(self._signaled_at, self._busy_until) + self.grace_s

    def feed(self, data: bytes, now: float) -> None:
        """Process bytes from the pipe. They may end within a command."""
        data = self._rest + data
        position = 0
        while position < len(data):
            if data[position] < EXTEND:
                self._take_signal(data[position], now)
                position += 1
                continue
            if position + COMMAND.size > len(data):
                break
            command, value, num_bytes = COMMAND.unpack_from(data, position)
            end = position + COMMAND.size + num_bytes
            if end > len(data):
                break
            self._take_command(command, value, data[end - num_bytes : end], now)
            position = end
        self._rest = data[position:]

    def _take_signal(self, number: int, now: float) -> None:
        # Every signal that has a Python handler arrives here. Only the first stop signal counts: a second signal gives
        # no more time.
        if number in STOP_SIGNALS and not self.signal_name:
            self.signal_name = signal.Signals(number).name
            self._signaled_at = now

    def _take_command(self, command: int, value: float, text: bytes, now: float) -> None:
        if command == EXTEND:
            self._busy_until = now + value
        else:
            self.black_box = Path(os.fsdecode(text))


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
        """Whether the worker must end because the job may have continued without it. Its process group ends too."""

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
                self._request_save(reason)
            wait_s = min(clock.deadline, self._poll_at) - time.monotonic()
            if select.select([_PIPE_FD], [], [], min(max(0.0, wait_s), _LONGEST_WAIT_S))[0]:
                data = os.read(_PIPE_FD, 4096)
                if not data:
                    return ""
                clock.feed(data, time.monotonic())
                self._begin_to_poll()
        return ""

    def _lengthen_grace(self) -> bool:
        """Lengthen the grace period if the worker's steps need more time. Return whether they do."""
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

    def _request_save(self, reason: str) -> None:
        """Send the worker SIGTERM once, as a scheduler would: all ranks then agree on a step, save and stop."""
        if not self._clock.signal_name and os.getppid() == self._worker_pid:
            _write_stderr(f"megatrain: {self._worker} gets SIGTERM from its watchdog, to save and stop: {reason}\n")
            os.kill(self._worker_pid, signal.SIGTERM)

    def _stop_polling(self, error: DataError) -> None:
        self._fence_rule, self._poll_at = None, math.inf
        _write_stderr(f"megatrain: the watchdog of {self._worker} will not end it if the executor freezes: {error}\n")


def _write_stderr(text: str) -> None:
    # The reader of stderr may be gone, or frozen with the pipe full. This must not prevent the kill.
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode())
