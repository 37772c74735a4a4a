"""The supervisor of the program that reads a host's devices: starts it, restarts it, and receives its samples.

If no line arrives within the deadline, the program is killed, and it is not restarted until the kernel has ended the
process. There is a pause before each restart. A program that always ends with the same exit code or signal is not
restarted for ever; a driver that hangs has no limit, because a restart every ten minutes costs nothing. Callers never
wait: `take` and `problem` return at once.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.exit_codes import end_text
from megatrain.contracts.pauses import growing_pauses
from megatrain.contracts.records.record import decode
from megatrain.programs.child_process import ChildProcess
from megatrain.programs.restart_limit import NOT_STARTED, RepeatedFailures
from megatrain_diagnostics.devices.sample import HostSample

_logger = logging.getLogger(__name__)
DEADLINE_S = 30.0
"""Deadline for a line, in addition to the interval: without a daemon that keeps the driver loaded, NVML may take ten
seconds to open."""
_POLL_S = 0.5
_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 600.0
_MAX_WAITING = 64
_MAX_BYTES = 1 << 20
"""Limit of the size of a line. A line with 64 GPUs and 64 interfaces has 60 kB."""


class DeviceSupervisor:
    """Runs until `close`. `interval_s`: time between two readings."""

    def __init__(
        self,
        interval_s: float,
        dcgm_url: str = "",
        *,
        deadline_s: float = DEADLINE_S,
        pause_s: float = _PAUSE_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        flags = ["--interval-s", f"{interval_s:g}", *(["--dcgm-url", dcgm_url] if dcgm_url else [])]
        self._words: Sequence[str] = [sys.executable, "-m", "megatrain_diagnostics.devices", *flags]
        self._deadline_s, self._pause_s, self._environment = interval_s + deadline_s, pause_s, environment
        self._waiting: deque[HostSample] = deque(maxlen=_MAX_WAITING)
        self._newest: HostSample | None = None
        self._problem = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="devices of the host", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> HostSample | None:
        return self._newest

    @property
    def problem(self) -> str:
        """The reason why there are no samples, or the driver's error in the newest one; empty if there is neither."""
        return self._problem

    def take(self) -> list[HostSample]:
        """Return the samples since the last call."""
        found = []
        with suppress(IndexError):
            while True:
                found.append(self._waiting.popleft())
        return found

    def close(self) -> None:
        """Kill the program. If it hangs in the kernel, its process remains."""
        self._closed.set()
        self._thread.join(2 * _POLL_S + 1.0)

    def _run(self) -> None:
        pauses, failures = growing_pauses(self._pause_s, _LONGEST_PAUSE_S), RepeatedFailures()
        while not self._closed.is_set():
            began = time.monotonic()
            why, code = self._live()
            if self._closed.is_set():
                return
            if time.monotonic() - began > _LONGEST_PAUSE_S:
                pauses = growing_pauses(self._pause_s, _LONGEST_PAUSE_S)
                failures.forget()
            if failures.count(code, why):
                times = f"{why} {failures.number} times"
                self._warn(f"{times}, and is not started again: fix the cause, then launch the job again")
                return
            self._warn(why)
            self._closed.wait(next(pauses))

    def _live(self) -> tuple[str, int]:
        """Run the program until it exits, is silent or `close` is called; return why, and its exit code (0: killed)."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            child = ChildProcess(self._words, environment=self._environment, output=write_end)
        except OSError as error:
            return f"the program that reads devices cannot be started: {error}", NOT_STARTED
        finally:
            os.close(write_end)
        try:
            why = self._listen(read_end)
            if why or self._closed.is_set():
                return why, 0
            code = child.wait(_POLL_S)  # its output has ended, so it exits by itself
            ended = "has closed its output" if code is None else end_text(code)
            return f"the program that reads devices {ended}", code or 0
        finally:
            os.close(read_end)
            child.send(signal.SIGKILL)
            while child.wait(_POLL_S) is None:
                if self._closed.is_set():
                    break
                self._warn(
                    "the program that reads devices hangs in the GPU driver and cannot be killed: reboot the host"
                )

    def _listen(self, read_end: int) -> str:
        """Take the program's lines. Return "" when its output ends or `close` is called, else why it must be killed."""
        deadline, rest = time.monotonic() + self._deadline_s, b""
        while not self._closed.is_set():
            if not select.select([read_end], [], [], _POLL_S)[0]:
                if time.monotonic() > deadline:
                    return (
                        f"the program that reads devices has printed nothing for {self._deadline_s:.0f} s; "
                        "the GPU driver may hang"
                    )
                continue
            chunk = os.read(read_end, 1 << 16)
            if not chunk:
                return ""
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _MAX_BYTES:
                return "the program that reads devices printed an overlong line"
            for line in lines:
                self._take(line)
                deadline = time.monotonic() + self._deadline_s
        return ""

    def _take(self, line: bytes) -> None:
        try:
            sample = decode(HostSample, line, "a sample of the devices")
        except CoordinationError as error:
            self._warn(str(error))
            return
        self._waiting.append(sample)
        self._newest = sample
        self._problem = sample.driver.error

    def _warn(self, why: str) -> None:
        if why != self._problem:
            _logger.warning("device telemetry has stopped: %s", why)
        self._problem = why
