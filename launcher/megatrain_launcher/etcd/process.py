"""The etcd process of one job: started by this process, restarted when it dies, and stopped when this process exits.

Its data is in <run>/coordination, so that the numbers of rounds and incidents continue when the job is launched again.
It starts on a unix socket in a directory of mode 0700, which no other user can reach, and gets its password there. For
a job of one host it stays there. If other hosts must reach it, it is restarted on the host's address with TLS, and
accepts only clients that have the job's key (ADR 0038). It is not a cluster: a job that must survive the loss of any
host uses a separate etcd (--rdzv-endpoint).

Files that are removed from its directory while etcd runs are restored (ADR 0043).
"""

from __future__ import annotations

import io
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import ConfigError, CoordinationError
from megatrain.contracts.files.own_files import make_own_directory
from megatrain.contracts.files.vanished_files import RecentRemovals, is_in_place
from megatrain.contracts.files.whole_files import write_private
from megatrain.contracts.pauses import growing_pauses
from megatrain.programs.child_process import ChildProcess
from megatrain_job.commands.etcd_flags import without_password
from megatrain_job.coordination.settings import Credentials, Endpoint, EtcdSettings, TlsFiles
from megatrain_launcher.etcd.access import WrongPasswordError, make_certificate, restrict_users
from megatrain_launcher.etcd.data import HeldFiles, frozen
from megatrain_launcher.etcd.place import LOCK, make_private, place_of_sockets, take_lock, why_not_started
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

_logger = logging.getLogger(__name__)
_NUM_PORT_TRIES = 5
_POLL_S = 0.02
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0
_FILES_CHECK_S = 0.25
"""Pause between two checks of etcd's files. Two checks must agree, because etcd itself removes old files."""
_REPAIR_AGAIN_S = 2.0
_MAX_LOG_BYTES = 16 * 2**20


def free_port(address: str) -> int:
    """Return a port that is free at the moment."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.bind((address, 0))
        port: int = sock.getsockname()[1]
        return port


class EtcdProcess(Closable):
    """A context manager that runs an etcd for clients with `credentials`: on a unix socket, or with `tls` on an IP
    `address`.

    `directory`: for data and log; created if it does not exist. `tls`: where a new certificate for the address and its
    key are written. Raises on entering: ConfigError when there is no etcd program, another user could have written in
    the directory, or another launch uses it; CoordinationError with the end of etcd's log when etcd does not start.
    """

    def __init__(
        self,
        directory: Path,
        credentials: Credentials,
        *,
        address: str = "",
        tls: TlsFiles | None = None,
        program: Path | None = None,
    ) -> None:
        if bool(address) != (tls is not None):
            raise ConfigError([f"an etcd that listens on {address or 'a unix socket'}: an address and TLS go together"])
        self._directory = directory.absolute()
        self._credentials = credentials
        self._address = address
        self._tls = tls or TlsFiles()
        self._program = program
        self._sockets = self._directory
        self._endpoint: Endpoint | None = None
        self._command: Sequence[str] = ()
        self._child: ChildProcess | None = None
        self._is_up = threading.Event()
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._data = HeldFiles(self._directory / "etcd")
        self._kept: dict[Path, bytes] = {}
        """Small files, by path, that are rewritten when they are removed."""
        self._lock_file: io.FileIO | None = None
        self._missing: frozenset[str] = frozenset()
        self._has_listened = False
        """Whether etcd's socket was seen since etcd was started."""
        self._removals = RecentRemovals()
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="etcd process", daemon=True)
        self._held = ExitStack()

    @property
    def settings(self) -> EtcdSettings:
        """The settings for clients of this etcd."""
        assert self._endpoint is not None
        return EtcdSettings((self._endpoint,), self._credentials, self._tls)

    @property
    def pid(self) -> int | None:
        """The process's pid; None while it is being restarted."""
        child = self._child
        return None if child is None else child.pid

    @property
    def problems(self) -> tuple[str, ...]:
        """The reason why removed files cannot be restored, and which of etcd's files were removed lately."""
        return tuple(filter(None, (self._problem, *self._removals.texts)))

    def keep(self, path: Path, content: bytes) -> None:
        """Keep a small file that only this user can access, and rewrite it when it is removed.

        Raises: OSError.
        """
        write_private(path, content)
        self._kept = {**self._kept, path: content}

    def drop(self, path: Path) -> None:
        """Remove a file that `keep` wrote."""
        self._kept = {kept: content for kept, content in self._kept.items() if kept != path}
        path.unlink(missing_ok=True)

    @property
    def log(self) -> Path:
        return self._directory / "etcd.log"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._lock_file = take_lock(self._directory)
            stack.callback(self._release)
            self._sockets = stack.enter_context(place_of_sockets(self._directory))
            stack.callback(self._end)
            self._thread.start()
            self._is_up.wait()
            if self._failure is not None:
                raise self._failure
            self._held = stack.pop_all()
        return self

    def close(self) -> None:
        self._held.close()

    def _release(self) -> None:
        self._data.close()
        if self._lock_file is not None:
            self._lock_file.close()

    def _end(self) -> None:
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        """Run etcd until `close`. The thread is the parent of all etcd processes: they are killed when it ends."""
        try:
            self._start_first()
            self._find_missing()  # from here on etcd's files are held open
        except (ConfigError, CoordinationError) as error:
            self._end_child()
            self._failure = error
            return
        except OSError as error:
            self._end_child()
            self._failure = ConfigError([why_not_started(self._directory, error)])
            return
        finally:
            self._is_up.set()
        pauses = growing_pauses(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        while not self._closing.is_set():
            started_at = time.monotonic()
            self._watch()
            if self._closing.is_set():
                break
            if time.monotonic() - started_at > _MAX_PAUSE_S:
                pauses = growing_pauses(_FIRST_PAUSE_S, _MAX_PAUSE_S)
            _logger.warning("etcd has ended (see %s); starting it again", self.log)
            self._closing.wait(next(pauses))
            # removed files are restored first: etcd would exit again without its data
            self._missing = frozenset()
            for _ in range(2):
                self._check_files()
            with suppress(OSError):  # out of processes or memory: the next pass of the loop tries again
                if self._child is None and not self._problem:
                    self._start()
        self._end_child()

    def _watch(self) -> None:
        """Wait until etcd is gone or `close` was called; restore removed files meanwhile."""
        check_at = time.monotonic()
        while self._child is not None and not self._closing.wait(_POLL_S):
            if self._child.poll() is not None:
                self._child = None
            elif time.monotonic() >= check_at:
                self._check_files()
                check_at = time.monotonic() + (_REPAIR_AGAIN_S if self._problem else _FILES_CHECK_S)

    def _check_files(self) -> None:
        """Restore the files if one of them has been missing at two checks in a row."""
        before, self._missing = self._missing, self._find_missing()
        if not self._missing:
            self._problem = ""
        if not before & self._missing:
            return
        try:
            self._repair(self._missing)
        except (ConfigError, CoordinationError, OSError) as error:
            names = ", ".join(sorted(self._missing))
            problem = f"{self._directory}: removed while the job's etcd runs, and cannot be put back: {names}: {error}"
            if problem != self._problem:
                _logger.error("%s", problem)
            self._problem = problem
        else:
            self._problem, self._missing = "", frozenset()

    def _find_missing(self) -> frozenset[str]:
        """Return the names of files that were removed, or replaced by others."""
        missing = {f"etcd/member/{name}" for name in self._data.poll(self.pid)}
        assert self._lock_file is not None
        if not is_in_place(self._lock_file.fileno(), self._directory / LOCK):
            missing.add(LOCK)
        missing |= {path.name for path in self._kept if not path.exists()}
        endpoint = self._endpoint
        if self._child is not None and endpoint is not None and endpoint.path:
            is_there = Path(endpoint.path).exists()
            if self._has_listened and not is_there:
                missing.add(CLIENT_SOCKET)
            self._has_listened = self._has_listened or is_there
        return frozenset(missing)

    def _repair(self, missing: frozenset[str]) -> None:
        """Restore the missing files. If data cannot be copied, etcd continues to serve; two etcd processes never run at
        once.

        Raises: ConfigError when the directory belongs to another launch now; CoordinationError when etcd does not start
        again; OSError.
        """
        make_private(self._directory)
        if LOCK in missing:
            lock_file = take_lock(self._directory)
            assert self._lock_file is not None
            self._lock_file.close()
            self._lock_file = lock_file
        for path, content in self._kept.items():
            if not path.exists():
                write_private(path, content)
        if self._sockets != self._directory:
            make_own_directory(self._sockets)
        lost_data = any(name.startswith("etcd/") for name in missing)
        if lost_data:
            self._restore()
        elif CLIENT_SOCKET in missing:
            self._end_child()
        if lost_data or CLIENT_SOCKET in missing:
            self._start_again()
        what = "its etcd continues, and none of its data is lost"
        _logger.error("%s", self._removals.record(f"{self._directory} ({', '.join(sorted(missing))})", what))

    def _restore(self) -> None:
        """Restore the data as it is now, and end the process that has the removed files open."""
        if self._child is None:
            self._data.copy()
            return
        with frozen(self._child):
            self._data.copy()
            self._child.kill()
        self._child = None

    def _start_again(self) -> None:
        """Start etcd on the files in place, and wait until it serves. Raises: CoordinationError, OSError."""
        self._start()
        problem = self._wait_until_serving(self.settings)
        if problem:
            self._end_child()
            raise CoordinationError(f"etcd in {self._directory} {problem}; see {self.log}")

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def _start(self) -> None:
        self._has_listened = False
        # etcd also reads options from ETCD_* variables, and exits if an option is given twice
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        self._child = ChildProcess(
            self._command, log=self.log, environment=without_password(environment), directory=self._sockets
        )

    def _wait_until_serving(self, settings: EtcdSettings) -> str:
        assert self._child is not None
        return wait_until_serving(settings, self._child, self._closing)

    def _start_first(self) -> None:
        program = self._program or find_etcd()
        _rotate_log(self.log)
        always = base_command(program, self._directory)
        socket_endpoint = Endpoint.of_socket(self._sockets / CLIENT_SOCKET)
        socket_url = f"unix://{CLIENT_SOCKET}"
        self._start_and_wait([*always, *listening(socket_url), *NEW], EtcdSettings((socket_endpoint,)))
        try:
            restrict_users(EtcdSettings((socket_endpoint,)), self._credentials)
        except WrongPasswordError as error:
            hint = f"remove {self._directory / 'etcd'}, after which rounds count from 1 again"
            raise CoordinationError(f"etcd in {self._directory} {error}; {hint}") from error
        self._remember(self._credentials.file)
        self._endpoint = socket_endpoint
        # an etcd that has lost its data, and so its password, must not start with empty data: it exits instead
        self._command = [*always, *listening(socket_url), *EXISTING]
        if self._address:
            self._end_child()
            make_certificate(self._tls, self._address)
            self._remember(self._tls.certificate, self._tls.key)
            self._start_on_free_port(always)

    def _remember(self, *paths: Path | None) -> None:
        """Rewrite these existing files, too, whenever they are removed."""
        self._kept = {**self._kept, **{path: path.read_bytes() for path in paths if path is not None}}

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
        """Start etcd with this command and wait until it serves. Raises: CoordinationError; then no process is left."""
        log_size = self.log.stat().st_size if self.log.exists() else 0
        self._command = command
        (self._endpoint,) = settings.endpoints
        self._start()
        problem = self._wait_until_serving(settings)
        if problem:
            self._end_child()
            text = self.log.read_bytes()[log_size:].decode(errors="replace")
            why = "; ".join(filter(None, (problem, lack_of_space(self._directory))))
            raise CoordinationError(f"etcd in {self._directory} {why}; {self.log}:\n{last_errors(text)}")


def _rotate_log(log: Path) -> None:
    with suppress(OSError):
        if log.stat().st_size > _MAX_LOG_BYTES:
            log.replace(log.with_suffix(".log.1"))
