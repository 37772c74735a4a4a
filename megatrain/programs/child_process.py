"""A child process that cannot outlive us: killed by the kernel when the thread that started it ends, however that is.

It has a session of its own, so that Ctrl-C at the terminal reaches only us: we end our children in an order that lets
a job save. Start children from a thread that lives as long as they shall.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from megatrain.programs.processes import end_with_parent


class ChildProcess:
    """A running child; `log` takes its output (appended), without one it shares ours. As a context it is ended.

    `directory`: where it works; without one, where we do. `output`: a descriptor that takes what it answers; the log
    has its complaints only then.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        output: int | None = None,
        stop_s: float = 10.0,
    ) -> None:
        self.words = tuple(words)
        self._stop_s = stop_s
        kept = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process = subprocess.Popen(
                self.words,
                stdin=subprocess.DEVNULL,
                stdout=kept if output is None else output,
                stderr=kept,
                env=None if environment is None else dict(environment),
                cwd=directory,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, os.getpid()),
            )
        finally:
            if kept is not None:
                os.close(kept)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for its end and return the exit code, None when time is over before."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def stop(self) -> int:
        """Ask it to end, kill it when it does not within `stop_s`, and return its exit code. No process of it is
        left."""
        self.send(signal.SIGTERM)
        code = self.wait(self._stop_s)
        return self.kill() if code is None else code

    def kill(self) -> int:
        """End it and whatever is still in its session's first group, now."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
