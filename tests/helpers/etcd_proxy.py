"""A TCP proxy between a client and etcd that simulates faults: it cuts, stalls, slows down or falsifies the traffic.

It can also hold single requests, and deliver them long after their sender has given up.
"""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum, auto

from megatrain.contracts.closable import Closable

_PIECE_BYTES = 1 << 14
_DRIP_S = 0.05


class Conduct(Enum):
    """The behavior of a proxy while this is set."""

    PASS = auto()
    REFUSE = auto()
    """Connections are closed immediately."""
    SWALLOW = auto()
    """Requests are dropped, answers never arrive."""
    GARBAGE = auto()
    """Requests that `corrupts` selects are dropped and answered with `garbage`; others pass."""
    HALF_ANSWER = auto()
    """Requests are executed, the connection ends in the middle of the answer."""
    DRIP = auto()
    """Requests are executed, answers arrive byte by byte."""


LONG_LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n"
"""An answer with a length that Python's int() refuses to parse."""


def is_watch_of(directory: str, request: bytes) -> bool:
    """Return whether a request opens a watch of keys that begin with `directory`."""
    return b"/v3/watch" in request and base64.b64encode(directory.encode()) in request


class FirstWatches:
    """Selects the first watch of each of some directories, for `EtcdProxy.corrupts`."""

    def __init__(self, directories: Iterable[str]) -> None:
        self.left = set(directories)

    def __call__(self, request: bytes) -> bool:
        found = {directory for directory in self.left if is_watch_of(directory, request)}
        self.left -= found
        return bool(found)


class EtcdProxy(Closable):
    """Forwards to a port of this machine. `budget` may return, for each new connection, the number of bytes after which
    it is cut."""

    def __init__(self, port: int, *, budget: Callable[[], int | None] = lambda: None) -> None:
        self.conduct = Conduct.PASS
        self.garbage: Iterable[bytes] = [b"garbage\r\n\r\n"]
        """Sent piece by piece until the client closes the connection."""
        self.corrupts: Callable[[bytes], bool] = lambda request: True
        self.num_corrupted = 0
        self.num_connections = 0
        self.keeps_back: Callable[[bytes], bool] = lambda request: False
        """Whether a request is held until `deliver`. Its sender's connection ends without an answer."""
        self.kept: list[bytes] = []
        self.before: Callable[[bytes], object] = lambda request: None
        """Called with each request; etcd gets the request only after the return."""
        self._port = port
        self._budget = budget
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._start(self._accept)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def deliver(self) -> None:
        """Send etcd all held requests in their order, and wait for its answers."""
        while self.kept:
            with socket.create_connection(("127.0.0.1", self._port)) as server:
                server.sendall(self.kept.pop(0))
                # Closing our side would cancel the request.
                assert server.recv(_PIECE_BYTES)

    def cut(self) -> None:
        """Close all open connections."""
        with self._lock:
            for one in self._sockets:
                _shut(one)

    def close(self) -> None:
        self._closed.set()
        _shut(self._listener)
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            if self.conduct is Conduct.REFUSE:
                client.close()
                continue
            self._start(lambda client=client: self._serve(client))  # type: ignore[misc]

    def _serve(self, client: socket.socket) -> None:
        with socket.socket() as server, client:
            with self._lock:
                self._sockets |= {client, server}
            try:
                # No etcd listens behind the proxy: the client's connection ends, as without a proxy.
                with suppress(OSError):
                    if not self._closed.is_set():
                        self._forward(client, server)
            finally:
                with self._lock:
                    self._sockets -= {client, server}

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        server.connect(("127.0.0.1", self._port))
        back = threading.Thread(target=self._answers, args=(server, client), name="proxy back", daemon=True)
        back.start()
        self._requests(client, server)
        back.join()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(_PIECE_BYTES):
                self.before(data)
                match self.conduct:
                    case Conduct.SWALLOW:
                        pass
                    case Conduct.GARBAGE if self.corrupts(data):
                        self.num_corrupted += 1
                        for piece in self.garbage:
                            client.sendall(piece)
                        _shut(client)
                    case _ if self.keeps_back(data):
                        self.kept.append(data)
                        _shut(client)
                    case _:
                        server.sendall(data)
        _shut(server)

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        left = self._budget()
        with suppress(OSError):
            while data := server.recv(_PIECE_BYTES):
                match self.conduct:
                    case Conduct.SWALLOW:
                        continue
                    case Conduct.HALF_ANSWER:
                        client.sendall(data[: len(data) // 2])
                        break
                    case Conduct.DRIP:
                        for index in range(len(data)):
                            client.sendall(data[index : index + 1])
                            if self._closed.wait(_DRIP_S):
                                break
                        continue
                    case _:
                        pass
                if left is not None:
                    data, left = data[:left], left - len(data)
                client.sendall(data)
                if left is not None and left <= 0:
                    break
        _shut(client)
        _shut(server)


def _shut(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
