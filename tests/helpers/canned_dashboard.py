"""A server for tests of the page: the built page, the headers of the real server, and responses that a test defines.

It can require a token, be interrupted, restart with another session, and it records its requests. It uses the standard
library only, one thread per connection, and listens on loopback.
"""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from megatrain_dashboard.actions.document import ActionAnswer, ActionRequest
from megatrain_dashboard.api.live import LiveDocument
from megatrain_dashboard.api.notes import NoteRequest
from megatrain_dashboard.api.session import SessionDocument
from megatrain_dashboard.assets import Asset, installed_assets
from megatrain_dashboard.responses.document import Document, ErrorDocument
from megatrain_dashboard.security.headers import SECURITY_HEADERS
from megatrain_dashboard.security.sessions import PAGE_SECRET_HEADER
from tests.helpers.canned_job import NOW_S, STEP

_TICK_S = 0.05
_PAGE_SECRET = "a-secret-of-the-page"
_PREFIX = "/api/v1/"
TOPICS = ("overview", "series", "heat", "ranks", "stragglers", "incidents", "hosts", "checkpoints", "logs", "timeline")


@dataclass
class CannedDashboard:
    """The current responses. Tests change them while the page is open."""

    responses: dict[str, Document | bytes]
    """By path below the API's prefix; bytes are a container of arrays."""
    token: str = ""
    """Required in requests unless it is empty."""
    session: str = "first"
    step: int = STEP
    versions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOPICS, 1))
    is_down: bool = False
    """Every request ends without a response, streams too."""
    asked: list[str] = field(default_factory=list)
    actions: list[ActionRequest] = field(default_factory=list)
    notes: list[NoteRequest] = field(default_factory=list)
    url: str = ""
    is_over: threading.Event = field(default_factory=threading.Event)

    def news(self, *topics: str) -> None:
        """Announce on the event stream that these views have new data."""
        self.versions = {**self.versions, **{topic: self.versions[topic] + 1 for topic in topics}}

    def live_document(self) -> LiveDocument:
        return LiveDocument(session=self.session, at_unix_s=NOW_S, step=self.step, versions=self.versions)


@contextmanager
def canned_dashboard(responses: Mapping[str, Document | bytes], **changes: Any) -> Iterator[CannedDashboard]:
    """Serve the page with these responses."""
    canned = CannedDashboard(dict(responses), **changes)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(canned, installed_assets()))
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": _TICK_S}, name="canned-dashboard")
    thread.start()
    canned.url = f"http://127.0.0.1:{server.server_port}/"
    try:
        yield canned
    finally:
        canned.is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(canned: CannedDashboard, assets: Mapping[str, Asset]) -> type[BaseHTTPRequestHandler]:
    class Handler(_DashboardHandler):
        dashboard = canned
        files = assets

    return Handler


class _DashboardHandler(BaseHTTPRequestHandler):
    dashboard: CannedDashboard
    files: Mapping[str, Asset]
    timeout = 5.0

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        canned = self.dashboard
        if canned.is_down:
            self.close_connection = True
            return
        if not path.startswith(_PREFIX):
            self._file(path.removeprefix("/") or "index.html")
            return
        name = path.removeprefix(_PREFIX)
        canned.asked.append(name)
        if not self._is_known():
            self._refuse(401, "unauthorized", "The server requires a token.")
        elif name == "live":
            self._stream()
        elif (response := canned.responses.get(name)) is None:
            self._refuse(404, "not-found", f"nothing is known of {name}")
        elif isinstance(response, bytes):
            self._send(200, response, "application/x-megatrain-arrays")
        else:
            self._send(200, response.model_dump_json().encode(), "application/json")

    def do_POST(self) -> None:
        if self.dashboard.is_down:
            self.close_connection = True
            return
        canned = self.dashboard
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["X-Megatrain-Request"] == "1", "the page must send its header"
        if self.path == f"{_PREFIX}session":
            if body["token"] != canned.token:
                self._refuse(401, "unauthorized", "This token is not known.")
                return
            session = SessionDocument(role="viewer", ends_unix_s=2_000_000_000, page_secret=_PAGE_SECRET)
            self._send(200, session.model_dump_json().encode(), "application/json", cookie="session=yes")
            return
        if self.path == f"{_PREFIX}notes":
            canned.notes.append(NoteRequest.model_validate(body))
            self._send(200, b"{}", "application/json")
            return
        request = ActionRequest.model_validate(body)
        canned.actions.append(request)
        would = "would be asked" if request.is_dry_run else "was asked"
        response = ActionAnswer(
            action_id="a-1",
            is_dry_run=request.is_dry_run,
            is_accepted=True,
            is_done=False,
            text=f"The driver {would} to {request.kind} {request.target or canned.session}.",
        )
        self._send(200, response.model_dump_json().encode(), "application/json")

    def do_DELETE(self) -> None:
        self._send(204, b"", "application/json", cookie="session=; Max-Age=0")

    def _is_known(self) -> bool:
        has_cookie = "session=yes" in self.headers.get("Cookie", "")
        return not self.dashboard.token or (has_cookie and self.headers.get(PAGE_SECRET_HEADER) == _PAGE_SECRET)

    def _file(self, name: str) -> None:
        asset = self.files.get(name)
        if asset is None:
            self._refuse(404, "not-found", f"no file {name}")
        else:
            self._send(200, asset.body, asset.media_type)

    def _refuse(self, status: int, word: str, text: str) -> None:
        self._send(status, ErrorDocument(error=word, text=text).model_dump_json().encode(), "application/json")

    def _send(self, status: int, body: bytes, media_type: str, cookie: str = "") -> None:
        self.send_response(status)
        for name, value in SECURITY_HEADERS:
            self.send_header(name.decode(), value.decode())
        if cookie:
            self.send_header("Set-Cookie", f"{cookie}; HttpOnly; SameSite=Strict; Path=/")
        if len(body) > 1024 and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 1)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        try:
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # The page has moved on to another view.
            self.close_connection = True

    def _stream(self) -> None:
        canned = self.dashboard
        self.send_response(200)
        for name, value in SECURITY_HEADERS:
            self.send_header(name.decode(), value.decode())
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.close_connection = True
        reported = ""
        while not canned.is_over.wait(_TICK_S) and not canned.is_down:
            document = canned.live_document().model_dump_json()
            try:
                if document != reported:
                    self.wfile.write(f"event: change\ndata: {document}\n\n".encode())
                    reported = document
                else:
                    self.wfile.write(b": here\n\n")  # Otherwise, the server never notices that a page is gone.
                self.wfile.flush()
            except OSError:
                return
