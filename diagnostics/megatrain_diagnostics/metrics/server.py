"""The HTTP server that Prometheus scrapes: /metrics and /healthz, on loopback, or with a bearer token.

A connection serves one request, of at most 16 KiB, and is closed after ten seconds. At most 32 connections are open;
a further one closes the oldest. So scanners and attackers cannot block the server.
"""

from __future__ import annotations

import hmac
import io
import os
import socket
import stat
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.network_address import is_loopback

REQUEST_S = 10.0
MAX_CONNECTIONS = 32
_MAX_HEAD_BYTES = 16 * 1024
_MAX_TOKEN_BYTES = 4096


def read_token(path: str, key: str = "diagnostics.metrics_token_file", *, is_secret: bool = False) -> str:
    """Return the token in a file; "" if `path` is empty. `is_secret`: require that only the owner can read the file.

    Raises: ConfigError naming the key and the file.
    """
    if not path:
        return ""
    try:
        with Path(path).open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            token = file.read(_MAX_TOKEN_BYTES + 2).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError([f"{key}={path!r} cannot be read: {reason}"]) from error
    if is_secret and mode & 0o077:
        raise ConfigError([f"{key}={path!r} has mode {mode:04o}: others may read it; `chmod 600` it, and change it"])
    if not token or len(token) > _MAX_TOKEN_BYTES:
        raise ConfigError([f"{key}={path!r} contains {len(token)} characters; write one token"])
    return token


class MetricsServer:
    """Answers scrapes in a background thread until it is closed.

    key: the name of the port in the configuration, for errors.
    Raises: ConfigError for a port that is not available, and for an address other than loopback without a token.
    """

    def __init__(self, registry: CollectorRegistry, address: str, port: int, token: str = "", *, key: str) -> None:
        if not token and not is_loopback(address):
            problem = f"diagnostics.metrics_address={address!r} is reachable from other machines without a token"
            raise ConfigError([f"{problem}; set diagnostics.metrics_token_file, or listen at 127.0.0.1"])

        class Handler(_Handler):
            pass

        Handler.registry, Handler.token = registry, token
        try:
            self._server = _Server((address, port), Handler)
        except OSError as error:
            problem = f"{key}={port}: cannot listen at {address}: {error.strerror or error}"
            raise ConfigError([f"{problem}; name another port, or 0 for any that is free"]) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Release the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._lock = threading.Lock()
        self._since_s: dict[socket.socket, float] = {}
        """Open connection -> monotonic time at which it was opened; the oldest first."""
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._since_s[request] = time.monotonic()
        self.service_actions()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close connections that are open for too long, and the oldest ones beyond the limit.

        `serve_forever` calls it twice a second.
        """
        late_s = time.monotonic() - REQUEST_S
        with self._lock:
            for connection, since_s in list(self._since_s.items()):
                if since_s > late_s and len(self._since_s) <= MAX_CONNECTIONS:
                    return
                del self._since_s[connection]
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._since_s.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: a client that disconnects is not an error of this server."""


class _RequestHead(io.BufferedReader):
    """Reads a request's head; at its size limit, reading returns the end of the stream."""

    num_left = _MAX_HEAD_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        most = self.num_left if size is None or size < 0 else min(size, self.num_left)
        line = super().readline(most)
        self.num_left -= len(line)
        return line


class _Handler(BaseHTTPRequestHandler):
    registry: CollectorRegistry
    token: str
    timeout = REQUEST_S
    server_version = "megatrain"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self._head = _RequestHead(self.connection.makefile("rb", buffering=0))
        self.rfile = self._head

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self._head.num_left:
            self._answer(431, "text/plain; charset=utf-8", b"a request has at most 16 KiB\n")
        elif path == "/healthz":
            self._answer(200, "text/plain; charset=utf-8", b"ok\n")
        elif path != "/metrics":
            self._answer(404, "text/plain; charset=utf-8", b"this server has only /metrics and /healthz\n")
        elif not self._is_allowed():
            self._answer(
                401, "text/plain; charset=utf-8", b"a bearer token is needed\n", ("WWW-Authenticate", "Bearer")
            )
        else:
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, content_type, encode(self.registry))

    def _is_allowed(self) -> bool:
        if not self.token:
            return True
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode(errors="replace"), self.token.encode())
        return scheme.lower() == "bearer" and is_right

    def _answer(self, code: int, content_type: str, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(code)
        for name, value in (("Content-Type", content_type), ("Content-Length", str(len(body))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape comes every few seconds."""
