"""A reverse proxy that shows a server below a path, as nginx does; it removes the path from requests, or keeps it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.helpers.waiting import DEADLINE_S

_OF_ONE_HOP = ("connection", "keep-alive", "transfer-encoding")


@contextmanager
def path_proxy(port: int, path: str, *, is_taken_away: bool) -> Iterator[int]:
    """Forward requests below `path` to the server at `port`; yield the proxy's port. All others are answered with
    404."""

    class Handler(BaseHTTPRequestHandler):
        def forward(self) -> None:
            if not self.path.startswith(f"{path}/"):
                self.send_error(HTTPStatus.NOT_FOUND, "not below the path")
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_ONE_HOP}
            behind = HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
            try:
                behind.request(
                    self.command, self.path.removeprefix(path) if is_taken_away else self.path, body, headers
                )
                self._answer(behind)
            except OSError:
                return  # A browser closes streams that it no longer reads.
            finally:
                behind.close()

        do_GET = do_POST = do_DELETE = forward

        def _answer(self, behind: HTTPConnection) -> None:
            answer = behind.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _OF_ONE_HOP:
                    self.send_header(name, value)
            self.end_headers()
            while part := answer.read1():  # a live stream has no end
                self.wfile.write(part)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.socket.close()
