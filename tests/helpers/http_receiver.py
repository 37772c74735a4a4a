"""A real HTTP server on loopback that stores the requests, and answers as a test configures it."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from tests.helpers.certificates import CertificateFiles
from tests.helpers.waiting import wait_until


@dataclass(frozen=True, slots=True)
class Posted:
    """A request as received."""

    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    at_unix_s: float

    @property
    def document(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class ReceiverReply:
    """An answer. `is_dropped`: the connection ends without an answer; `hold`: this is waited for first."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b"ok"
    is_dropped: bool = False
    hold: threading.Event | None = None
    raw: Callable[[Any, threading.Event], None] | None = None
    """Writes any bytes, until the event signals that the server ends."""


class HttpReceiver:
    """Serves while its context is open. `replies`: of the next requests, one each; then `usual`."""

    def __init__(
        self, *replies: ReceiverReply, usual: ReceiverReply | None = None, tls: CertificateFiles | None = None
    ) -> None:
        self.replies = list(replies)
        self.usual = usual or ReceiverReply()
        self.posted: list[Posted] = []
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self._scheme = "http"
        if tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(tls.certificate, tls.key)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
            self._scheme = "https"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._server.server_port}"

    @property
    def documents(self) -> list[Any]:
        return [one.document for one in self.posted]

    def wait_for(self, number: int) -> list[Any]:
        """Wait for a number of requests; return their bodies, read as JSON."""
        wait_until(lambda: len(self.posted) >= number, f"request {number}")
        return self.documents

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        for reply in (*self.replies, self.usual):
            if reply.hold is not None:
                reply.hold.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _take(self, posted: Posted) -> ReceiverReply:
        with self._lock:
            self.posted.append(posted)
            return self.replies.pop(0) if self.replies else self.usual

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                headers = {name.lower(): value for name, value in self.headers.items()}
                reply = receiver._take(Posted(self.path, headers, body, time.time()))
                with suppress(OSError):
                    self._answer(reply)

            def _answer(self, reply: ReceiverReply) -> None:
                if reply.hold is not None:
                    reply.hold.wait()
                if reply.raw is not None:
                    reply.raw(self.wfile, receiver._is_over)
                if reply.is_dropped or reply.raw is not None:
                    self.close_connection = True
                    return
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
