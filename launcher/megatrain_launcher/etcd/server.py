"""The single member of a job's etcd: its command, its process, and the endpoint at which it serves."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatrain.contracts.errors import CoordinationError
from megatrain.programs.child_process import ChildProcess
from megatrain_job.commands.etcd_flags import without_password
from megatrain_job.coordination.settings import Credentials, Endpoint, EtcdSettings, TlsFiles
from megatrain_launcher.etcd.access import WrongPasswordError, make_certificate, restrict_users
from megatrain_launcher.etcd.program import (
    CLIENT_SOCKET,
    EXISTING,
    NEW,
    base_command,
    find_etcd,
    guarded,
    lack_of_space,
    last_errors,
    listening,
    wait_until_serving,
)

_NUM_PORT_TRIES = 5
_MAX_LOG_BYTES = 16 * 2**20


def free_port(address: str) -> int:
    """Return a port that is free at the moment."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.bind((address, 0))
        port: int = sock.getsockname()[1]
        return port


class EtcdServer:
    """Runs at most one etcd process at a time. One thread calls the methods, and is the parent of the process."""

    def __init__(
        self, directory: Path, credentials: Credentials, address: str, tls: TlsFiles, closing: threading.Event
    ) -> None:
        """address: empty for a unix socket. closing: no start is waited for once this event is set."""
        self.directory = directory
        """The directory of data and log."""
        self.sockets = directory
        """The directory of the sockets."""
        self.child: ChildProcess | None = None
        """The process; None if there is none."""
        self._credentials, self._address, self._tls, self._closing = credentials, address, tls, closing
        self._endpoint: Endpoint | None = None
        self._command: Sequence[str] = ()
        self._has_listened = False
        """Whether etcd's socket was seen since etcd was started."""

    @property
    def settings(self) -> EtcdSettings:
        """The settings for clients of this etcd."""
        assert self._endpoint is not None
        return EtcdSettings((self._endpoint,), self._credentials, self._tls)

    @property
    def pid(self) -> int | None:
        child = self.child
        return None if child is None else child.pid

    @property
    def log(self) -> Path:
        return self.directory / "etcd.log"

    def start_first(self, program: Path | None) -> None:
        """Start etcd for the first time: set its password through a unix socket, then serve at the endpoint.

        Raises: ConfigError, CoordinationError, OSError.
        """
        _rotate_log(self.log)
        always = base_command(program or find_etcd(), self.directory)
        endpoint, url = Endpoint.of_socket(self.sockets / CLIENT_SOCKET), f"unix://{CLIENT_SOCKET}"
        self._start_and_wait([*always, *listening(url), *NEW], EtcdSettings((endpoint,)))
        try:
            restrict_users(EtcdSettings((endpoint,)), self._credentials)
        except WrongPasswordError as error:
            hint = f"remove {self.directory / 'etcd'}, after which rounds count from 1 again"
            raise CoordinationError(f"etcd in {self.directory} {error}; {hint}") from error
        # an etcd that has lost its data, and so its password, must not start with empty data: it exits instead
        self._command = [*always, *listening(url), *EXISTING]
        if self._address:
            self.end()
            make_certificate(self._tls, self._address)
            self._start_on_free_port(always)

    def start(self) -> None:
        """Start etcd on the files in place. Raises: OSError."""
        self._has_listened = False
        # etcd also reads options from ETCD_* variables, and exits if an option is given twice
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        self.child = ChildProcess(
            self._command, log=self.log, environment=without_password(environment), directory=self.sockets
        )

    def start_again(self) -> None:
        """Start etcd on the files in place, and wait until it serves. Raises: CoordinationError, OSError."""
        problem = self._problem_at_start(self.settings)
        if problem:
            raise CoordinationError(f"etcd in {self.directory} {problem}; see {self.log}")

    def end(self) -> None:
        """Stop the process, if there is one."""
        child, self.child = self.child, None
        if child is not None:
            child.stop()

    def has_lost_socket(self) -> bool:
        """Return whether the socket of the running etcd was removed."""
        endpoint = self._endpoint
        if self.child is None or endpoint is None or not endpoint.path:
            return False
        is_there, had_listened = Path(endpoint.path).exists(), self._has_listened
        self._has_listened = had_listened or is_there
        return had_listened and not is_there

    def _start_on_free_port(self, always: Sequence[str]) -> None:
        for number in range(_NUM_PORT_TRIES):
            endpoint = Endpoint("https", self._address, free_port(self._address))
            command = [*always, *listening(str(endpoint)), *guarded(self._tls), *EXISTING]
            try:
                return self._start_and_wait(command, EtcdSettings((endpoint,), self._credentials, self._tls))
            except CoordinationError as error:
                if "address already in use" not in str(error) or number == _NUM_PORT_TRIES - 1:
                    raise

    def _start_and_wait(self, command: Sequence[str], settings: EtcdSettings) -> None:
        """Start etcd with this command and wait until it serves. Raises: CoordinationError with the end of its log."""
        log_size = self.log.stat().st_size if self.log.exists() else 0
        self._command = command
        (self._endpoint,) = settings.endpoints
        problem = self._problem_at_start(settings)
        if problem:
            text = self.log.read_bytes()[log_size:].decode(errors="replace")
            why = "; ".join(filter(None, (problem, lack_of_space(self.directory))))
            raise CoordinationError(f"etcd in {self.directory} {why}; {self.log}:\n{last_errors(text)}")

    def _problem_at_start(self, settings: EtcdSettings) -> str:
        """Start etcd and wait until it serves; return why it does not. Then no process is left."""
        self.start()
        assert self.child is not None
        problem = wait_until_serving(settings, self.child, self._closing)
        if problem:
            self.end()
        return problem


def _rotate_log(log: Path) -> None:
    with suppress(OSError):
        if log.stat().st_size > _MAX_LOG_BYTES:
            log.replace(log.with_suffix(".log.1"))
