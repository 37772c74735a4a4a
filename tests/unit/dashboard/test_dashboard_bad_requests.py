"""Malformed requests to a running server: each gets the common refusal, and other clients are served meanwhile."""

from __future__ import annotations

import itertools
import select
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse

from megatrain_dashboard.settings import DashboardSettings, Limits
from tests.helpers.dashboard_server import (
    JOB_PATH,
    PAGE,
    Reply,
    Served,
    action,
    assert_others_are_served,
    bearer,
    head_of,
    read_reply,
    served,
)
from tests.helpers.waiting import DEADLINE_S, wait_until

LIMITS = Limits(max_wrong_tokens=3, max_connections=32)
HASTY = Limits(head_s=1.0, body_s=1.0, stall_s=0.5)


def failing() -> APIRouter:
    routes = APIRouter()

    @routes.get("/api/v1/broken")
    async def broken() -> None:
        raise RuntimeError("the secret of /etc/passwd")

    @routes.get("/api/v1/large")
    async def large() -> Response:
        return Response(b"x" * 30_000_000)

    @routes.get("/api/v1/endless")
    async def endless() -> Response:
        return StreamingResponse(itertools.repeat(b"x" * 1_000_000))

    return routes


def refused_all(replies: Mapping[str, Reply], status: int, text: str = "") -> None:
    """Raise AssertionError, with its name, for a reply that is not a refusal with this status."""
    assert {name: reply.status for name, reply in replies.items()} == dict.fromkeys(replies, status)
    for reply in replies.values():
        reply.assert_refused(status, text)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An open page on loopback, with the default configuration."""
    settings = DashboardSettings(port=0, limits=LIMITS)
    with served(tmp_path_factory.mktemp("open"), settings, more=[failing()]) as server:
        yield server


PATHS = (
    "/../../../../etc/passwd",
    "/..%2f..%2f..%2fetc%2fpasswd",
    "/assets/../../../app.py",
    "/assets/%2e%2e/%2e%2e/app.py",
    "/assets/..%5c..%5capp.py",
    "/assets//etc/passwd",
    "/assets/%00",
    "/assets/app-1a2b3c4d.js%00.html",
    "//etc/passwd",
    "/api/v1/../../etc/passwd",
    "/api/v1/hosts/..%2f..%2fetc%2fpasswd",
    "/api/v1/incidents/..%2f..%2f..%2fetc%2fpasswd",
    "http://127.0.0.1/etc/passwd",
    "/static/index.html",
    "/index.html/..",
    "/.git/config",
)


def test_paths_outside_the_page_are_not_found(page: Served) -> None:
    refused_all({path: page.ask(path) for path in PATHS}, 404)
    assert_others_are_served(page)


def test_the_page_and_its_files_are_served(page: Served) -> None:
    for path in ("/", "/?view=heat", "/heat"):
        reply = page.ask(path)
        assert (reply.status, reply.body) == (200, PAGE)
        reply.assert_secured()
        assert reply.headers["cache-control"] == "no-cache"
    script = page.ask("/assets/app-1a2b3c4d.js")
    assert script.status == 200
    assert "immutable" in script.headers["cache-control"]
    assert page.ask("/", {"If-None-Match": page.ask("/").headers["etag"]}).status == 304


def test_other_methods_are_refused(page: Served) -> None:
    headers = page.from_page()
    for path in (JOB_PATH, "/", "/healthz"):
        methods = ("PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW")
        refused_all({method: page.ask(path, headers, method=method) for method in methods}, 405)
    assert_others_are_served(page)


def test_an_oversize_body_is_not_read(page: Served) -> None:
    largest = b"{}".ljust(16384)
    page.ask("/api/v1/actions", page.from_page(), method="POST", body=largest).assert_refused(400, "")
    big = action(reason="x" * 20_000)
    page.ask("/api/v1/actions", page.from_page(), method="POST", body=big).assert_refused(413, "16384")
    chunks = b"".join(b"1000\r\n" + b"x" * 4096 + b"\r\n" for _ in range(20)) + b"0\r\n\r\n"
    chunked = page.from_page() | {"Transfer-Encoding": "chunked"}
    page.ask("/api/v1/actions", chunked, method="POST", body=chunks).assert_refused(413, "16384")
    # a length that would take days
    reported = page.from_page() | {"Content-Length": str(10**12)}
    page.ask("/api/v1/actions", reported, method="POST", body=b"{}").assert_refused(413, "16384")
    assert_others_are_served(page)


def test_get_request_with_a_body_is_refused(page: Served) -> None:
    page.ask(JOB_PATH, method="GET", body=b"{}").assert_refused(400, "must not have a body")


def test_malformed_action_is_a_bad_request(page: Served) -> None:
    bodies = (b"", b"{", b"[]", b"null", b'{"kind": "checkpoint"}', b"\xff\xfe", b'{"a":' * 3000)
    with served(page.source.run.root, DashboardSettings(port=0, enable_actions=True)) as server:
        headers = server.from_page()
        replies = {repr(body[:40]): server.ask("/api/v1/actions", headers, method="POST", body=body) for body in bodies}
        refused_all(replies, 400)
        assert_others_are_served(server)


def test_a_header_twice_is_refused(page: Served) -> None:
    raw = head_of("POST", "/api/v1/actions", page.from_page() | bearer("y"), page.port, action())
    replies = {}
    for twice in (
        "Host: 127.0.0.1", "Authorization: Bearer x", "Origin: http://evil.example", "X-Megatrain-Request: 1",
        "Sec-Fetch-Site: same-origin", "Content-Type: text/plain",
    ):  # fmt: skip
        smuggled = raw.replace(b"\r\n\r\n", f"\r\n{twice}\r\n\r\n".encode(), 1)
        replies[twice] = page.exchange(smuggled)
    refused_all(replies, 400)
    assert_others_are_served(page)


def test_ambiguous_length_of_a_body_is_refused(page: Served) -> None:
    raw = head_of("POST", "/api/v1/actions", page.from_page(), page.port)
    for lengths in (
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: gzip, chunked",
        "Content-Length: -1",
        "Content-Length : 5",
    ):
        smuggled = raw.replace(b"\r\n\r\n", f"\r\n{lengths}\r\n\r\n".encode(), 1) + b"0\r\n\r\n"
        reply = page.exchange(smuggled)
        assert reply.status in (400, 403, 413), lengths
        reply.assert_refused(reply.status)
        assert reply.headers["connection"] == "close", lengths
    assert_others_are_served(page)


def test_malformed_or_too_large_head_is_refused(page: Served) -> None:
    many = {f"X-{number}": "1" for number in range(80)}
    page.ask(JOB_PATH, many).assert_refused(431)
    page.ask(JOB_PATH, {"X-Large": "y" * 20_000}).assert_refused(431, "16384")
    page.ask(JOB_PATH, {"X-Large": "y" * 400_000}).assert_refused(400, "16384")
    page.ask(f"{JOB_PATH}?{'q' * 20_000}").assert_refused(431)
    page.exchange(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 TLS here\r\n\r\n").assert_refused(400)
    page.exchange(b"nonsense\r\n\r\n").assert_refused(400, "not an HTTP request")
    assert_others_are_served(page)


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A page without a bound on waiting requests."""
    settings = DashboardSettings(port=0, limits=HASTY)
    with served(tmp_path_factory.mktemp("hasty"), settings, more=[failing()]) as server:
        yield server


@pytest.mark.slow
def test_connections_of_slow_clients_are_closed(hasty: Served) -> None:
    """Concurrently: a head that never arrives, or never ends; one after a first request; a body that never ends."""
    slow_body = hasty.from_page() | {"Content-Length": "100"}
    begun = {
        b"": b"",
        b"GET / HT": b"",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: 1\r\n": b"X-Slower: 1\r\n",
        head_of("GET", "/healthz", {}, hasty.port): b"GET /healthz HTT",
        head_of("POST", "/api/v1/actions", slow_body, hasty.port) + b"{": b"}",
    }
    with ExitStack() as stack:
        clients = []
        for first, later in begun.items():
            client = stack.enter_context(hasty.connected())
            client.sendall(first)
            if b"healthz" in first:
                assert read_reply(client).status == 200
            client.sendall(later)
            clients.append(client)
        assert_others_are_served(hasty)
        for client in clients:
            read_reply(client).assert_refused(408, "1 s")
            assert client.recv(1) == b""


def test_client_that_does_not_read_is_dropped(hasty: Served) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", hasty.port))
        # a response that never ends: after its end, the server would close an idle connection anyway
        client.sendall(head_of("GET", "/api/v1/endless", {}, hasty.port))
        assert_others_are_served(hasty)
        # Nothing is read, so only a reset is visible: it does not wait behind sent data.
        poll = select.poll()
        poll.register(client, select.POLLERR | select.POLLHUP)
        assert poll.poll(1000 * DEADLINE_S), "the connection is still there"
    assert_others_are_served(hasty)


@pytest.mark.slow
def test_unread_answers_are_limited_in_bytes(tmp_path: Path) -> None:
    """The answers of two clients that do not read exceed the limit: the older connection is dropped."""
    settings = DashboardSettings(port=0, limits=Limits(max_unread_bytes=40_000_000, stall_s=10 * DEADLINE_S))
    with served(tmp_path, settings, more=[failing()]) as server, ExitStack() as stack:
        polls = []
        for _ in range(2):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(head_of("GET", "/api/v1/large", {}, server.port))
            assert client.recv(4) == b"HTTP"
            polls.append(select.poll())
            polls[-1].register(client, select.POLLERR | select.POLLHUP)
        assert polls[0].poll(1000 * DEADLINE_S), "the older connection is still there"
        assert not polls[1].poll(0), "the newer connection is gone as well"
        assert_others_are_served(server)


def test_number_of_connections_is_limited(page: Served) -> None:
    with ExitStack() as stack:
        for _ in range(32):
            client = stack.enter_context(page.connected())
            client.sendall(head_of("GET", "/healthz", {}, page.port))
            assert read_reply(client).status == 200
        reply = page.exchange(head_of("GET", "/healthz", {}, page.port))
        reply.assert_refused(503, "32 connections")
        assert reply.headers["retry-after"]
    wait_until(lambda: page.ask("/healthz").status == 200, "a free connection again")


def test_internal_error_shows_no_details(page: Served, caplog: pytest.LogCaptureFixture) -> None:
    page.ask("/api/v1/broken").assert_refused(500, "its log has the details")
    assert b"passwd" not in page.ask("/api/v1/broken").body
    assert "the secret of /etc/passwd" in caplog.text
    assert_others_are_served(page)


def test_unknown_or_repeated_parameter_is_refused(page: Served) -> None:
    queries = ("?round=1", "?x=1", "?%3Cscript%3E=1", "?a&b", "?callback=alert")
    refused_all({query: page.ask(f"{JOB_PATH}{query}") for query in queries}, 400, "no such parameter")
    page.ask("/api/v1/series?points=100&points=200").assert_refused(400, "given twice")
