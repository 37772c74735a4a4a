"""Child processes: one that ends with its parent, and a companion, which survives its parent.

A `ChildProcess` has a parent-death guard: the kernel kills it when the thread that started it ends, for any reason.
Start it from a thread that lives as long as the child must. Both have their own session, so that Ctrl-C at the terminal
reaches only the parent: the parent ends its children in an order in which a job can save.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from megatrain.programs.processes import install_parent_death_guard


class ChildProcess:
    """A running child process. As a context manager it stops the child at the end of the block.

    log: a file to which the child appends its output; None: it writes to the parent's. directory: its working
    directory; None: the parent's. output: a descriptor that receives its stdout; the log then has only its stderr.
    inherited: descriptors that the child keeps open, such as that of a listening socket.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        output: int | None = None,
        inherited: Sequence[int] = (),
        stop_s: float = 10.0,
    ) -> None:
        self.command = tuple(command)
        self._stop_s = stop_s
        kept = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=kept if output is None else output,
                stderr=kept,
                env=None if environment is None else dict(environment),
                cwd=directory,
                pass_fds=inherited,
                start_new_session=True,
                preexec_fn=partial(install_parent_death_guard, os.getpid()),
            )
        finally:
            if kept is not None:
                os.close(kept)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the child runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait until the child exits and return its exit code; None if it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the child has exited."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def stop(self) -> int:
        """Send SIGTERM; kill the child if it does not exit within `stop_s`. Return its exit code."""
        self.send(signal.SIGTERM)
        code = self.wait(self._stop_s)
        return self.kill() if code is None else code

    def kill(self) -> int:
        """Kill the child and all processes of its process group, and return its exit code."""
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


def start_companion(
    command: Sequence[str], log: Path, name: str, inherited: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a program. It survives this process, unless it installs a parent-death guard (programs/processes.py).

    Its output is appended to `log` if that can be opened: a full disk there must not prevent the program's work.
    While this process runs, a thread of this `name` waits for the program, so that it does not remain as a zombie.
    `inherited`: descriptors that the program keeps open, such as that of a lock.
    No code runs in the child before the program: a worker has threads and maps much memory.

    Raises: OSError when it cannot be started.
    """
    with _open_log(log) as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=inherited,
        )
    threading.Thread(target=process.wait, name=name, daemon=True).start()
    return process


def _open_log(log: Path) -> IO[bytes]:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)  # a user may have removed the directory
        return log.open("ab")
    except OSError:
        return open(os.devnull, "wb")
