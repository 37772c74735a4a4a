"""A machine without a scheduler: its name as a host, and several executors that simulate several hosts."""

from __future__ import annotations

import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Self

from megatrain.contracts.closable import Closable
from megatrain.contracts.exit_codes import end_text
from megatrain.programs.child_process import ChildProcess
from megatrain_launcher.hosts.adapter import HostFacts

_POLL_S = 0.05


def host_name() -> str:
    """Return this machine's name as a host id."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("-._") or "host"


class LocalPlatform:
    """Implements HostAdapter for a machine outside of a cluster."""

    name = "local"

    def facts(self) -> HostFacts:
        return HostFacts(host=host_name())

    def cordon(self, host: str, reason: str) -> str:
        return ""


class LocalHosts(Closable):
    """Context manager that runs executors host-1 to host-N on this machine; none is left when the context ends.

    `arguments`: the arguments of `megatrain launch` for each executor, without --host-id. A killed executor is not
    started again; a spare replaces it.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        count: int,
        environment: Mapping[str, str],
        report: Callable[[str], None],
        program: Sequence[str] = (sys.executable, "-m", "megatrain"),
    ) -> None:
        self._program = list(program)
        self._arguments = list(arguments)
        self._names = [f"host-{number}" for number in range(1, count + 1)]
        self._environment = environment
        self._report = report
        self._running: dict[str, ChildProcess] = {}
        self._held = ExitStack()

    @property
    def pids(self) -> dict[str, int]:
        """The running executors' pids, by host."""
        return {name: child.pid for name, child in self._running.items()}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._end)
            for name in self._names:
                command = [*self._program, "launch", f"--host-id={name}", *self._arguments]
                self._running[name] = ChildProcess(command, environment=self._environment)
            self._held = stack.pop_all()
        return self

    def close(self) -> None:
        self._held.close()

    def stop(self) -> None:
        """Ask all executors to save and stop. May be called from a signal handler."""
        for child in list(self._running.values()):
            child.send(signal.SIGTERM)

    def wait(self) -> list[int]:
        """Wait until all have exited and return their exit codes, negative for signals; report deaths by signal."""
        codes = []
        while self._running:
            for name, child in list(self._running.items()):
                code = child.poll()
                if code is None:
                    continue
                del self._running[name]
                codes.append(code)
                if code < 0:
                    self._report(f"{name}: its executor {end_text(code)}")
            time.sleep(_POLL_S)
        return codes

    def _end(self) -> None:
        """Kill the executors that still run, without an orderly stop, because the context ended before `wait`."""
        for child in self._running.values():
            child.kill()
        self._running.clear()
