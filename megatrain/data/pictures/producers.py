"""Producers of this host: starts them beside this program, and restarts those that exit.

A picture at which producers end repeatedly is given up (decoding_record.py).
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from megatrain.contracts.closable import Closable
from megatrain.data.pictures.decoding_record import DecodingRecord
from megatrain.peers.link import SECRET_BYTES, PeerAddress
from megatrain.peers.server import listen
from megatrain.programs.child_process import ChildProcess
from megatrain.programs.supervisor import Supervisor
from megatrain.programs.thread_limits import thread_error

_STOP_S = 2.0
MakeCommand = Callable[[Sequence[int]], Sequence[str]]
"""Returns the command of a producer from the descriptors that it inherits: of its listener, of its secret, and of the
two files of its DecodingRecord."""


def producer_command(directories: Sequence[Path], decoder: str, num_threads: int = 1) -> MakeCommand:
    """Return the command of a producer of the pictures in some directories. decoder: one of DECODERS."""

    def command(inherited: Sequence[int]) -> Sequence[str]:
        arguments = (*map(str, inherited), decoder, str(num_threads), *map(str, directories))
        return (sys.executable, "-m", "megatrain.data.pictures.producer", *arguments)

    return command


class PictureProducers(Closable):
    """Producers that run during the block. Their addresses stay the same when they are started again.

    listeners: one for each producer; each is closed once its producer will not be started again. logs: the directory
    for the output of the producers. report: receives a message when a producer exits.
    Raises: OSError when the files in memory cannot be created; MegatrainError, at the beginning of the block, when a
    thread cannot be started.
    """

    def __init__(
        self,
        command: MakeCommand,
        listeners: Sequence[socket.socket],
        secret: bytes,
        logs: Path,
        report: Callable[[str], None],
    ) -> None:
        self.addresses = tuple(PeerAddress(*listener.getsockname()[:2]) for listener in listeners)
        self.secret = secret
        self._command = command
        self._logs = logs
        self._report = report
        with ExitStack() as opened:
            self._secret_file = _memory_file("picture-secret", opened)
            os.write(self._secret_file, secret)
            self._ends = _memory_file("picture-ends", opened)
            fcntl.fcntl(self._ends, fcntl.F_SETFL, os.O_APPEND)
            self._notes = [_memory_file("picture-note", opened) for _ in listeners]
            self._files = opened.pop_all()
        self._closed = threading.Event()
        self._listeners = listeners
        self._supervisors = [self._supervisor(number, one) for number, one in enumerate(listeners)]
        # the kernel kills a producer when the thread that started it ends
        self._threads = [
            threading.Thread(target=self._run, args=pair, name=f"picture-producer-{number}", daemon=True)
            for number, pair in enumerate(zip(self._supervisors, listeners, strict=True))
        ]

    def problem(self) -> str:
        """Return why no producer runs and none is started again; empty while one may answer."""
        if any(thread.is_alive() for thread in self._threads):
            return ""
        return self.failure() or "all producers of pictures have ended"

    def failure(self) -> str:
        """Return why a producer fails, or at which pictures it was killed last; empty if neither is known."""
        return next((one.problem for one in self._supervisors if one.problem), "")

    def wait(self) -> None:
        """Wait until all producers have ended and none will be started again."""
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        for thread in self._threads:
            try:
                thread.start()
            except RuntimeError as error:
                self.close()
                raise thread_error(
                    "a thread that watches a producer of pictures", error, "use fewer of them (pictures.producers)"
                ) from error
        return self

    def close(self) -> None:
        """Stop the producers."""
        self._closed.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for listener in self._listeners:  # those of threads that did not start are still open
            listener.close()
        self._files.close()

    def _run(self, supervisor: Supervisor, listener: socket.socket) -> None:
        supervisor.run(self._closed)
        listener.close()  # ends the connections that wait for a producer

    def _supervisor(self, number: int, listener: socket.socket) -> Supervisor:
        note = self._notes[number]
        inherited, record = (listener.fileno(), self._secret_file, note, self._ends), DecodingRecord(note, self._ends)

        def start(log: Path) -> ChildProcess:
            return ChildProcess(self._command(inherited), log=log, inherited=inherited, stop_s=_STOP_S)

        name, log = f"picture producer {number}", self._logs / f"producer-{number}.log"
        return Supervisor(name, start, log, self._report, record.add_end)


def local_producers(
    command: MakeCommand, num_producers: int, logs: Path, report: Callable[[str], None]
) -> PictureProducers:
    """Return producers for this program alone: on loopback, with a secret that only they have.

    Raises: CommunicationError when this machine has no loopback address; OSError as PictureProducers.
    """
    with ExitStack() as opened:
        listeners = [opened.enter_context(listen("127.0.0.1")) for _ in range(num_producers)]
        producers = PictureProducers(command, listeners, secrets.token_bytes(SECRET_BYTES), logs, report)
        opened.pop_all()
    return producers


def _memory_file(name: str, opened: ExitStack) -> int:
    """Create a file in memory; `opened` closes it."""
    file = os.memfd_create(name)
    opened.callback(os.close, file)
    return file
