"""The side that listens for connections of other programs (link.py): it authenticates and serves each connection in a
separate thread.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import CommunicationError
from megatrain.peers.link import PeerAddress, PeerConnection, PeerLimits
from megatrain.programs.background import lower_thread_priority

_logger = logging.getLogger(__name__)

_MAX_UNAUTHENTICATED = 8
"""The maximum number of connections that have not authenticated themselves."""
_BACKLOG = 128
"""Connections that wait to be accepted: ranks of many hosts may ask at the same time."""
_PAUSE_S = 0.1
_CLOSE_S = 2.0


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at an address of this machine. Port 0: the system chooses one.

    Raises: CommunicationError naming the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        where = PeerAddress(host, port) if port else host
        raise CommunicationError(f"{where}: cannot listen on this address: {error.strerror or error}") from error


class PeerServer(Closable):
    """Calls `serve` with each authenticated connection, in a separate thread; drops all other connections.

    The server closes the listener, and each connection after `serve`, which must handle all errors that it can expect.
    has_low_priority: its threads have the lowest priority, for transfers beside training that no rank waits for.
    patience_s: how long a connection waits while many others authenticate themselves before the server closes it.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        serve: Callable[[PeerConnection], None],
        limits: PeerLimits,
        *,
        has_low_priority: bool = True,
        patience_s: float = 0.0,
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._serve = serve
        self._limits = limits
        self._has_low_priority = has_low_priority
        self._patience_s = patience_s
        self._unauthenticated = threading.Semaphore(_MAX_UNAUTHENTICATED)
        self._is_closing = threading.Event()
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, PeerConnection] = {}
        self._has_logged_limit = False
        self._thread = threading.Thread(target=self._accept, name="peer-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and cut every connection."""
        self._is_closing.set()
        with suppress(OSError):  # the shutdown wakes the thread that waits in accept
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            served = dict(self._connections)
        for connection in served.values():
            connection.cut()
        for thread in (self._thread, *served):
            thread.join(_CLOSE_S)

    def _accept(self) -> None:
        if self._has_low_priority:
            lower_thread_priority()
        while not self._is_closing.is_set():
            try:
                connected, where = self._listener.accept()
            except OSError:
                # the listener is closed, or no file descriptor is free at the moment
                self._is_closing.wait(_PAUSE_S)
                continue
            if not self._unauthenticated.acquire(timeout=self._patience_s):
                connected.close()
                continue
            connection = PeerConnection(connected, str(PeerAddress(*where[:2])), self._limits)
            thread = threading.Thread(target=self._handle, args=(connection,), name="peer-connection", daemon=True)
            # with the lock held, the new thread cannot look for its connection before it is stored
            with self._lock:
                try:
                    thread.start()
                except RuntimeError as error:
                    self._drop(connection, error)
                else:
                    self._connections[thread] = connection

    def _drop(self, connection: PeerConnection, error: RuntimeError) -> None:
        """Close a connection for which the system starts no thread. The peer sees the end and may connect again."""
        connection.close()
        self._unauthenticated.release()
        if not self._has_logged_limit:
            self._has_logged_limit = True
            _logger.warning(
                "%s: the connection is closed, because no thread could be started for it: %s (see `ulimit -u` and "
                "pids.max); the server continues, and does not log further failures of this kind",
                connection.location,
                error,
            )

    def _handle(self, connection: PeerConnection) -> None:
        if self._has_low_priority:
            lower_thread_priority()
        try:
            with connection:
                if self._is_authentic(connection) and not self._is_closing.is_set():
                    self._serve(connection)
        finally:
            with self._lock:
                del self._connections[threading.current_thread()]

    def _is_authentic(self, connection: PeerConnection) -> bool:
        try:
            connection.authenticate(self._secret, is_server=True)
        except CommunicationError:
            return False
        finally:
            self._unauthenticated.release()
        return True
