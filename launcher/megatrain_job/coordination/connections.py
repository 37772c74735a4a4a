"""A client's connections to the endpoints of etcd: an idle one carries the next call."""

from __future__ import annotations

import ssl
import threading

from megatrain.contracts.closable import Closable
from megatrain_job.coordination.settings import Endpoint, EtcdSettings
from megatrain_job.coordination.transport import Deadline, EtcdConnection


class Connections(Closable):
    """Opens connections and keeps idle ones. Safe to use from many threads."""

    def __init__(self, settings: EtcdSettings) -> None:
        is_encrypted = any(endpoint.scheme == "https" for endpoint in settings.endpoints)
        self._context: ssl.SSLContext | None = settings.tls.context() if is_encrypted else None
        self._lock = threading.Lock()
        self._idle: dict[Endpoint, list[EtcdConnection]] = {endpoint: [] for endpoint in settings.endpoints}
        self._busy: set[EtcdConnection] = set()
        self._is_closed = False

    def open(self, endpoint: Endpoint, deadline: Deadline) -> EtcdConnection:
        """Return a new connection, which the caller closes. Raises: OSError."""
        return EtcdConnection(endpoint, self._context if endpoint.scheme == "https" else None, deadline)

    def take(self, endpoint: Endpoint, deadline: Deadline) -> EtcdConnection:
        """Lend an idle or a new connection until `give_back`. After `close`, the connection is interrupted at once.

        Raises: OSError.
        """
        connection: EtcdConnection | None = None
        while connection is None:
            with self._lock:
                if not self._idle[endpoint]:
                    break
                connection = self._idle[endpoint].pop()
            if not connection.is_quiet():
                connection.close()
                connection = None
        if connection is None:
            connection = self.open(endpoint, deadline)
        with self._lock:
            self._busy.add(connection)
            if self._is_closed:
                connection.interrupt()
        return connection

    def give_back(self, connection: EtcdConnection, *, is_reusable: bool) -> None:
        """Keep a connection for the next call if it is reusable, else close it."""
        with self._lock:
            self._busy.discard(connection)
            is_kept = is_reusable and not self._is_closed
            if is_kept:
                self._idle[connection.endpoint].append(connection)
        if not is_kept:
            connection.close()

    def close(self) -> None:
        """Close the idle connections and interrupt the others; calls in progress fail at once."""
        with self._lock:
            self._is_closed = True
            idle = [connection for connections in self._idle.values() for connection in connections]
            self._idle = {endpoint: [] for endpoint in self._idle}
            for connection in self._busy:
                connection.interrupt()
        for connection in idle:
            connection.close()
