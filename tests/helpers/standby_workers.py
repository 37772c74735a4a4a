"""Tiny programs for workers of a standby server, and queries of processes."""

from __future__ import annotations

import os
import socket
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain_launcher.standby.client import StandbyClient
from megatrain_launcher.standby.messages import WorkerStart
from megatrain_launcher.standby.server_keeper import WorkerExit
from tests.helpers.processes import is_running
from tests.helpers.waiting import wait_until


class Programs:
    """Writes modules below a directory, and starts them as workers of a server without an agent."""

    def __init__(self, client: StandbyClient, directory: Path) -> None:
        self.client = client
        self.directory = directory
        self._num_programs = 0
        self._exits: dict[int, WorkerExit] = {}

    def write(self, source: str) -> str:
        """Write a module and return its name."""
        self._num_programs += 1
        name = f"program_{self.directory.name.replace('-', '_')}_{self._num_programs}"
        (self.directory / f"{name}.py").write_text(textwrap.dedent(source))
        return name

    def start(self, source: str, *arguments: str, rank: int = 0, **environment: str) -> tuple[int, int]:
        """Start a program; return its pid and the pipe with its output."""
        read_fd, write_fd = os.pipe()
        start = WorkerStart(rank, self.write(source), arguments, environment, str(self.directory))
        try:
            (pid,) = self.client.start_workers([start], [write_fd])
        finally:
            os.close(write_fd)
        return pid, read_fd

    def run(self, source: str, *arguments: str, rank: int = 0, **environment: str) -> tuple[str, WorkerExit]:
        """Run a program to its end; return its output and its exit."""
        pid, read_fd = self.start(source, *arguments, rank=rank, **environment)
        with open(read_fd, encoding="utf-8") as output:
            text = output.read()
        return text, self.exit_of(pid)

    def exit_of(self, pid: int) -> WorkerExit:
        """Wait until a worker has ended."""

        def has_ended() -> bool:
            self._exits |= {found.pid: found for found in self.client.take_exits()}
            return pid in self._exits

        wait_until(has_ended, f"the end of worker {pid}")
        return self._exits[pid]


STAYS = "import signal; print('up'); signal.pause()"
"""A worker that runs until it is killed."""


@contextmanager
def programs(directory: Path, *, store: socket.socket | None = None) -> Iterator[Programs]:
    """Start a server that has imported nothing except its store, and programs for it."""
    directory.mkdir(parents=True, exist_ok=True)
    with StandbyClient(preload=(), store=store) as client:
        yield Programs(client, directory)


def wait_until_gone(*pids: int) -> None:
    wait_until(lambda: not any(is_running(pid) for pid in pids), f"the end of {pids}")


def read_line(read_fd: int) -> str:
    """Return the next line of a running worker's output."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(read_fd, 1)
        assert byte, f"the output ended after {line!r}"
        line += byte
    return line.decode().rstrip("\n")
