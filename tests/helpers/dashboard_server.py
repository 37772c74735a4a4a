"""A dashboard's server on a loopback socket for a job that a test defines, and a client that sends given requests."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from megatrain.contracts.errors import DataError
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.actions.handler import ActionHandler
from megatrain_dashboard.api.live import LiveStreams
from megatrain_dashboard.app import make_app
from megatrain_dashboard.assets import Asset
from megatrain_dashboard.security.headers import CONTENT_SECURITY_POLICY
from megatrain_dashboard.server import DashboardServer, listening_socket
from megatrain_dashboard.settings import DashboardSettings
from megatrain_dashboard.sources.facts import JobFacts
from megatrain_dashboard.sources.protocol import LiveState
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.store.daemon_state import DaemonState
from megatrain_diagnostics.store.hang_evidence import FiledEvidence
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_job.jobs.snapshot import JobSnapshot
from tests.helpers.waiting import DEADLINE_S

JOB = "demo"
VIEWER_TOKEN = "viewer-token-of-the-tests"
OPERATOR_TOKEN = "operator-token-of-the-tests"
PAGE = b"<!doctype html><title>page</title>"
JOB_PATH = "/api/v1/job"
SCRIPT = b"export const answer = 42;\n" * 100


def make_asset(body: bytes, media_type: str, cache: str = "no-cache") -> Asset:
    return Asset(body, None, media_type, f'"{len(body)}"', cache)


FILES = {
    "index.html": make_asset(PAGE, "text/html; charset=utf-8"),
    "assets/app-1a2b3c4d.js": make_asset(SCRIPT, "text/javascript; charset=utf-8", cache="public, immutable"),
}


@dataclass(slots=True)
class MadeUpJob:
    """A JobSource whose answers a test sets."""

    run: RunDirectory
    job: str = JOB
    is_recorded: bool = False
    etcd_endpoints: str = ""
    reported: JobSnapshot | None = None
    state: LiveState = field(default_factory=lambda: LiveState(None, {"overview": 1}))
    problem: str = ""
    num_reads: int = 0
    events: StoredEvents = field(init=False)

    def __post_init__(self) -> None:
        self.events = StoredEvents(self.run.events, num_threads=1)

    def snapshot(self) -> JobSnapshot | None:
        return self.reported

    def etcd_problem(self) -> str:
        return ""

    def daemon_state(self) -> DaemonState | None:
        return None

    def facts(self) -> JobFacts:
        return JobFacts()

    def roster(self, round_number: int | None) -> Roster:
        raise DataError("no rank has sent anything")

    def kept_evidence(self, round_number: int) -> FiledEvidence | None:
        return None

    def live(self) -> LiveState:
        self.num_reads += 1
        if self.problem:
            raise DataError(self.problem)
        return self.state

    def close(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class PageClient:
    """Requests to a server at a port of this machine."""

    port: int

    def ask(
        self, path: str, headers: Mapping[str, str] | None = None, *, method: str = "GET", body: bytes = b""
    ) -> Reply:
        """Send one request over a separate connection; return the response."""
        return self.exchange(head_of(method, path, headers or {}, self.port, body))

    def exchange(self, raw: bytes) -> Reply:
        """Send exactly these bytes; return the first response."""
        with self.connected() as client:
            client.sendall(raw)
            return read_reply(client)

    def connected(self) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return client

    def from_page(self) -> dict[str, str]:
        """Return the headers that our page sends with a request that changes something."""
        return {
            "Origin": f"http://127.0.0.1:{self.port}",
            "Sec-Fetch-Site": "same-origin",
            "X-Megatrain-Request": "1",
            "Content-Type": "application/json",
        }

    def log_in(self, token: str) -> Reply:
        """Log in as the page does."""
        body = json.dumps({"token": token}).encode()
        return self.ask("/api/v1/session", self.from_page(), method="POST", body=body)


@dataclass(frozen=True, slots=True)
class Served(PageClient):
    """A running server."""

    server: DashboardServer
    source: MadeUpJob
    streams: LiveStreams


@contextmanager
def served(
    directory: Path,
    settings: DashboardSettings,
    handler: ActionHandler | None = None,
    more: Sequence[APIRouter] = (),
    source: MadeUpJob | None = None,
    files: Mapping[str, Asset] = FILES,
) -> Iterator[Served]:
    """Run a server at any free port until the end of the block. `more`: additional routes of the test, which take
    precedence. `files`: of the page."""
    source = source or MadeUpJob(RunDirectory(directory))
    dashboard = make_app(source, settings, handler, files=files)
    for router in more:
        dashboard.app.include_router(router)
        dashboard.app.router.routes.insert(0, dashboard.app.router.routes.pop())
    with listening_socket(settings) as listening:
        server = DashboardServer(dashboard.app, listening, settings, dashboard.streams)
        try:
            yield Served(server.port, server, source, dashboard.streams)
        finally:
            assert server.close(), "the server did not end"


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def assert_secured(self) -> None:
        """Check the headers that every response must have."""
        assert self.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert self.headers["x-content-type-options"] == "nosniff"
        assert self.headers["referrer-policy"] == "no-referrer"
        assert self.headers["cross-origin-resource-policy"] == "same-origin"
        assert "camera=()" in self.headers["permissions-policy"]
        assert "cache-control" in self.headers
        assert "server" not in self.headers

    def assert_refused(self, status: int, text: str = "", where: object = "") -> None:
        """Check that the response is a refusal in the common form, and reveals nothing about our code. `where`: which
        of several requests it was."""
        assert self.status == status, (where, self.status, self.body)
        self.assert_secured()
        assert self.headers["content-type"] == "application/json"
        assert set(self.json) == {"error", "text"}
        assert text in self.json["text"], where
        assert b"Traceback" not in self.body
        assert b"site-packages" not in self.body


def head_of(method: str, path: str, headers: Mapping[str, str], port: int, body: bytes = b"") -> bytes:
    """Return a request as it is sent. A header with the value "" is left out."""
    named = {"Host": f"127.0.0.1:{port}", **headers}
    if body and "Content-Length" not in named and "Transfer-Encoding" not in named:
        named["Content-Length"] = str(len(body))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items() if value)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def read_reply(client: socket.socket) -> Reply:
    """Read one response of a known length, or to the end of the connection."""
    received = read_head(client)
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    pairs = [line.partition(": ")[::2] for line in lines[1:]]
    headers = {name.lower(): value for name, value in pairs}
    length = int(headers["content-length"]) if "content-length" in headers else None
    status = int(lines[0].split(" ")[1])
    while status not in (204, 304) and (length is None or len(body) < length):
        part = client.recv(65536)
        if not part:
            break
        body += part
    return Reply(status, headers, body)


def read_head(client: socket.socket) -> bytes:
    """Read until the end of a response's headers; what follows them in the same packets is returned too."""
    received = b""
    while b"\r\n\r\n" not in received:
        part = client.recv(65536)
        assert part, f"the connection ended after {received!r}"
        received += part
    return received


def read_rest(client: socket.socket) -> bytes:
    """Read until the other side closes the connection."""
    received = b""
    while part := client.recv(65536):
        received += part
    return received


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def session_headers(login: Reply) -> dict[str, str]:
    """Return the session headers that a page sends after its login: the cookie, and the page secret."""
    return {
        "Cookie": login.headers["set-cookie"].partition(";")[0],
        "X-Megatrain-Session": login.json["page_secret"],
    }


def assert_others_are_served(server: Served, headers: Mapping[str, str] | None = None) -> None:
    """Raise AssertionError if an ordinary client is not served."""
    reply = server.ask(JOB_PATH, headers)
    assert reply.status == 200
    reply.assert_secured()
    assert reply.json["job"] == "demo"


def action(**changed: object) -> bytes:
    """Return the body of a request for an action."""
    body = {
        "kind": "checkpoint", "reason": "before maintenance", "confirmation": "demo", "idempotency_key": "key-00000001",
    }  # fmt: skip
    return json.dumps({**body, **changed}).encode()
