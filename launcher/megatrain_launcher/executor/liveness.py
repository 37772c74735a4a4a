"""A port that tells whether this executor lives: whoever connects is told its session, and is disconnected.

A refused connection, or another session, proves that the executor is gone; silence proves nothing.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

_ANSWER_S = 1.0
_AGAIN_S = 0.05
_LAST_PORT = 65535


class LivenessPort:
    """Listens on a free port of this host until `close`."""

    def __init__(self, session: str, address: str = "") -> None:
        self.session = session
        """What is told; it may be replaced at any time."""
        self._socket = socket.create_server((address, 0), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="liveness port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which close alone does not
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closed.wait(_AGAIN_S):
                    return
                continue  # the caller has gone again, or this process has no descriptor left for the moment
            with connection, suppress(OSError):
                connection.settimeout(_ANSWER_S)
                connection.sendall(self.session.encode() + b"\n")


def ask_session(address: str, port: int, timeout_s: float) -> str | None:
    """Return the session of whoever listens there, empty when nobody does, None when that cannot be known."""
    if not 0 < port <= _LAST_PORT:
        return None
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as connection:
            connection.settimeout(timeout_s)
            return connection.makefile("rb").readline(256).decode(errors="replace").strip() or None
    except ConnectionRefusedError:
        return ""
    except OSError:
        return None
