"""The etcd process of one job: started by this process, restarted when it dies, and stopped when this process exits.

Its data is in <run>/coordination, so that the numbers of rounds and incidents continue when the job is launched again.
It starts on a unix socket in a directory of mode 0700, which no other user can reach, and gets its password there. For
a job of one host it stays there. If other hosts must reach it, it is restarted on the host's address with TLS, and
accepts only clients that have the job's key (ADR 0038). It is not a cluster: a job that must survive the loss of any
host uses a separate etcd (--rdzv-endpoint).

Files that are removed while etcd runs are restored (ADR 0043).
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import ConfigError, CoordinationError
from megatrain.contracts.files.own_files import make_own_directory
from megatrain.contracts.files.vanished_files import RecentRemovals
from megatrain.contracts.pauses import growing_pauses
from megatrain_job.coordination.settings import Credentials, EtcdSettings, TlsFiles
from megatrain_launcher.etcd.data import frozen
from megatrain_launcher.etcd.files import EtcdFiles
from megatrain_launcher.etcd.place import LOCK, place_of_sockets, why_not_started
from megatrain_launcher.etcd.program import CLIENT_SOCKET
from megatrain_launcher.etcd.server import EtcdServer

_logger = logging.getLogger(__name__)
_POLL_S = 0.02
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0
_FILES_CHECK_S = 0.25
"""Pause between two checks of etcd's files. Two checks must agree, because etcd itself removes old files."""
_REPAIR_AGAIN_S = 2.0


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
        self._directory = directory.absolute()
        self._small_files = [credentials.file, *((tls.certificate, tls.key) if tls is not None else ())]
        self._program = program
        self._is_up = threading.Event()
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._server = EtcdServer(self._directory, credentials, address, tls or TlsFiles(), self._closing)
        self.files = EtcdFiles(self._directory)
        self._missing: frozenset[str] = frozenset()
        self._removals = RecentRemovals()
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="etcd process", daemon=True)
        self._held = ExitStack()

    @property
    def settings(self) -> EtcdSettings:
        """The settings for clients of this etcd."""
        return self._server.settings

    @property
    def pid(self) -> int | None:
        """The process's pid; None while it is being restarted."""
        return self._server.pid

    @property
    def problems(self) -> tuple[str, ...]:
        """The reason why removed files cannot be restored, and which of etcd's files were removed lately."""
        return tuple(filter(None, (self._problem, *self._removals.texts)))

    @property
    def log(self) -> Path:
        return self._server.log

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.files.lock()
            stack.callback(self.files.close)
            self._server.sockets = stack.enter_context(place_of_sockets(self._directory))
            stack.callback(self._end)
            self._thread.start()
            self._is_up.wait()
            if self._failure is not None:
                raise self._failure
            self._held = stack.pop_all()
        return self

    def close(self) -> None:
        self._held.close()

    def _end(self) -> None:
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        """Run etcd until `close`. The thread is the parent of all etcd processes: they are killed when it ends."""
        try:
            self._server.start_first(self._program)
            self.files.keep_existing(*self._small_files)
            self._find_missing()  # from here on etcd's files are held open
        except (ConfigError, CoordinationError) as error:
            self._server.end()
            self._failure = error
            return
        except OSError as error:
            self._server.end()
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
                if self._server.child is None and not self._problem:
                    self._server.start()
        self._server.end()

    def _watch(self) -> None:
        """Wait until etcd is gone or `close` was called; restore removed files meanwhile."""
        check_at = time.monotonic()
        while self._server.child is not None and not self._closing.wait(_POLL_S):
            if self._server.child.poll() is not None:
                self._server.child = None
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
        lost_socket = {CLIENT_SOCKET} if self._server.has_lost_socket() else set()
        return frozenset(self.files.missing(self.pid) | lost_socket)

    def _repair(self, missing: frozenset[str]) -> None:
        """Restore the missing files. If data cannot be copied, etcd continues to serve; two etcd processes never run at
        once.

        Raises: ConfigError when the directory belongs to another launch now; CoordinationError when etcd does not start
        again; OSError.
        """
        self.files.restore(is_lock_missing=LOCK in missing)
        if self._server.sockets != self._directory:
            make_own_directory(self._server.sockets)
        lost_data = any(name.startswith("etcd/") for name in missing)
        if lost_data:
            self._restore_data()
        elif CLIENT_SOCKET in missing:
            self._server.end()
        if lost_data or CLIENT_SOCKET in missing:
            self._server.start_again()
        what = "its etcd continues, and none of its data is lost"
        _logger.error("%s", self._removals.record(f"{self._directory} ({', '.join(sorted(missing))})", what))

    def _restore_data(self) -> None:
        """Restore the data as it is now, and end the process that has the removed files open."""
        child = self._server.child
        if child is None:
            self.files.restore_data()
            return
        with frozen(child):
            self.files.restore_data()
            child.kill()
        self._server.child = None
