"""A page of another user's server on the same machine, opened by an operator who is logged in: it gets the cookie."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import expect

from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.assets import installed_assets
from megatrain_dashboard.settings import DashboardSettings
from megatrain_dashboard.sources.protocol import LiveState
from tests.helpers.canned_dashboard import TOPICS
from tests.helpers.dashboard_server import OPERATOR_TOKEN, MadeUpJob, Served, action, ask, from_page, served


class StrangerServer:
    """Another server of the host: keeps the headers of what browsers request from it."""

    def __init__(self) -> None:
        seen: list[dict[str, str]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                seen.append({name.lower(): value for name, value in self.headers.items()})
                body = b"<!doctype html><title>a page</title>"
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                return

        self.seen = seen
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@contextmanager
def stranger() -> Iterator[StrangerServer]:
    one = StrangerServer()
    thread = threading.Thread(target=one.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield one
    finally:
        one.server.shutdown()
        thread.join()
        one.server.server_close()


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[Served]:
    settings = DashboardSettings(port=0, enable_actions=True, operator_token=OPERATOR_TOKEN)
    source = MadeUpJob(RunDirectory(tmp_path), state=LiveState(None, dict.fromkeys(TOPICS, 1)))
    with served(tmp_path, settings, source=source, files=installed_assets()) as server:
        yield server


def test_another_port_gets_the_cookie_and_can_do_nothing_with_it(dashboard: Served, pages) -> None:
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
        elsewhere.goto(f"http://127.0.0.1:{other.server.server_port}/")
        cookie = next(one["cookie"] for one in other.seen if "cookie" in one)
        secrets = elsewhere.evaluate("JSON.stringify(Object.entries(localStorage))")
    assert re.search("megatrain-[0-9a-f]{12}=", cookie), "browsers send cookies to every port of a host"
    assert json.loads(secrets) == []

    stolen = from_page(dashboard.port) | {"Cookie": cookie}
    for path in ("/api/v1/job", "/api/v1/live", "/api/v1/audit"):
        ask(dashboard.port, path, stolen).assert_refused(HTTPStatus.UNAUTHORIZED)
    ask(dashboard.port, "/api/v1/actions", stolen, method="POST", body=action()).assert_refused(HTTPStatus.UNAUTHORIZED)
    ask(dashboard.port, "/api/v1/session", stolen, method="DELETE")
    page.reload()
    expect(page.locator("main[data-view=incidents] h1")).to_have_count(1)
