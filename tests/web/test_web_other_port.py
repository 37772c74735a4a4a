"""A page of another user's server on the same machine, opened by an operator who is logged in: it gets the cookie."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from playwright.sync_api import expect

from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.assets import installed_assets
from megatrain_dashboard.settings import DashboardSettings
from megatrain_dashboard.sources.protocol import LiveState
from tests.helpers.canned_dashboard import TOPICS
from tests.helpers.dashboard_server import OPERATOR_TOKEN, MadeUpJob, Served, action, served
from tests.helpers.other_user import OTHER_USER, as_other_user


@dataclass(frozen=True)
class Stranger:
    """Another user's server on this host, which keeps the headers of what browsers request from it."""

    port: int

    def answer(self, path: str) -> Any:
        with urlopen(f"http://127.0.0.1:{self.port}{path}") as answer:
            return json.loads(answer.read())


def serve_as_stranger(port_end: int) -> None:
    """Serve pages until /end is requested, and answer /seen with the own user and the earlier requests."""
    seen: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, body = "text/html", b"<!doctype html><title>a page</title>"
            if self.path in ("/seen", "/end"):
                kind, body = "application/json", json.dumps({"user": os.getuid(), "headers": seen}).encode()
            else:
                seen.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            if self.path == "/end":
                self.server.shutdown()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    os.write(port_end, f"{server.server_port}\n".encode())
    os.close(port_end)
    server.serve_forever(poll_interval=0.05)


@contextmanager
def stranger() -> Iterator[Stranger]:
    read_end, port_end = os.pipe()
    with ThreadPoolExecutor(1) as pool, open(read_end) as ports:
        serving = pool.submit(as_other_user, partial(serve_as_stranger, port_end))
        # Without a server, the connection ends here.
        serving.add_done_callback(lambda _: os.close(port_end))
        port = ports.readline()
        if not port:
            serving.result()
        one = Stranger(int(port))
        try:
            yield one
        finally:
            one.answer("/end")
            serving.result()


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[Served]:
    settings = DashboardSettings(port=0, enable_actions=True, operator_token=OPERATOR_TOKEN)
    source = MadeUpJob(RunDirectory(tmp_path), state=LiveState(None, dict.fromkeys(TOPICS, 1)))
    with served(tmp_path, settings, source=source, files=installed_assets()) as server:
        yield server


def test_another_port_gets_the_cookie_without_access(dashboard: Served, pages) -> None:
    pages.expected.append("401")
    page = pages.open(f"http://127.0.0.1:{dashboard.port}/#/incidents")
    page.get_by_label("Token").fill(OPERATOR_TOKEN)
    page.get_by_role("button", name="Sign in").click()
    page.locator("main[data-view=incidents] h1").wait_for()
    page.reload()
    page.locator("main[data-view=incidents] h1").wait_for()
    job = page.evaluate("fetch('api/v1/job').then((answer) => answer.status)")
    assert job == HTTPStatus.UNAUTHORIZED, "a request without the page secret"

    with stranger() as other:
        elsewhere = page.context.new_page()
        elsewhere.goto(f"http://127.0.0.1:{other.port}/")
        seen = other.answer("/seen")
        assert seen["user"] == OTHER_USER
        cookie = next(one["cookie"] for one in seen["headers"] if "cookie" in one)
        secrets = elsewhere.evaluate("JSON.stringify(Object.entries(localStorage))")
    assert re.search("megatrain-[0-9a-f]{12}=", cookie), "browsers send cookies to every port of a host"
    assert json.loads(secrets) == []

    stolen = dashboard.from_page() | {"Cookie": cookie}
    for path in ("/api/v1/job", "/api/v1/live", "/api/v1/audit"):
        dashboard.ask(path, stolen).assert_refused(HTTPStatus.UNAUTHORIZED)
    dashboard.ask("/api/v1/actions", stolen, method="POST", body=action()).assert_refused(HTTPStatus.UNAUTHORIZED)
    dashboard.ask("/api/v1/session", stolen, method="DELETE")
    page.reload()
    expect(page.locator("main[data-view=incidents] h1")).to_have_count(1)
