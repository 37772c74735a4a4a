"""Requests that are none, on a running server: each is refused as all are, and others are served meanwhile."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fastapi import APIRouter
from starlette.responses import Response

from megatrain_dashboard.settings import DashboardSettings, Limits
from tests.helpers.dashboard_server import (
    JOB_PATH,
    PAGE,
    Reply,
    Served,
    action,
    ask,
    assert_others_are_served,
    bearer,
    connected,
    exchange,
    from_page,
    head_of,
    read_reply,
    served,
)
from tests.helpers.waiting import wait_until

LIMITS = Limits(max_wrong_tokens=3)
HASTY = Limits(head_s=1.0, body_s=1.0, stall_s=0.5)


def failing() -> APIRouter:
    routes = APIRouter()

    @routes.get("/api/v1/broken")
    async def broken() -> None:
        raise RuntimeError("the secret of /etc/passwd")

    @routes.get("/api/v1/large")
    async def large() -> Response:
        return Response(b"x" * 30_000_000)

    return routes


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An open page on loopback, as it is without any configuration."""
    settings = DashboardSettings(port=0, limits=LIMITS)
    with served(tmp_path_factory.mktemp("open"), settings, more=[failing()]) as server:
        yield server


@pytest.mark.parametrize(
    "path",
    [
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
    ],
)
def test_no_path_leads_out(page: Served, path: str) -> None:
    ask(page.port, path).assert_refused(404)
    assert_others_are_served(page)


def test_the_page_and_its_files_are_served(page: Served) -> None:
    for path in ("/", "/?view=heat", "/heat"):
        reply = ask(page.port, path)
        assert (reply.status, reply.body) == (200, PAGE)
        reply.assert_secured()
        assert reply.headers["cache-control"] == "no-cache"
    script = ask(page.port, "/assets/app-1a2b3c4d.js")
    assert script.status == 200
    assert "immutable" in script.headers["cache-control"]
    assert ask(page.port, "/", {"If-None-Match": ask(page.port, "/").headers["etag"]}).status == 304


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_other_methods_are_refused(page: Served, method: str) -> None:
    headers = from_page(page.port)
    for path in (JOB_PATH, "/", "/healthz"):
        ask(page.port, path, headers, method=method).assert_refused(405)
    assert_others_are_served(page)


def test_an_oversize_body_is_not_read(page: Served) -> None:
    big = action(reason="x" * 20_000)
    ask(page.port, "/api/v1/actions", from_page(page.port), method="POST", body=big).assert_refused(413, "16384")
    chunks = b"".join(b"1000\r\n" + b"x" * 4096 + b"\r\n" for _ in range(20)) + b"0\r\n\r\n"
    chunked = from_page(page.port) | {"Transfer-Encoding": "chunked"}
    ask(page.port, "/api/v1/actions", chunked, method="POST", body=chunks).assert_refused(413, "16384")
    # a length that would take days
    reported = from_page(page.port) | {"Content-Length": str(10**12)}
    ask(page.port, "/api/v1/actions", reported, method="POST", body=b"{}").assert_refused(413, "16384")
    assert_others_are_served(page)


def test_a_question_has_no_body(page: Served) -> None:
    ask(page.port, JOB_PATH, method="GET", body=b"{}").assert_refused(400, "must not have a body")


@pytest.mark.slow(kept=["{"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"kind": "checkpoint"}', b"\xff\xfe", b'{"a":' * 3000])
def test_nonsense_is_a_bad_request(page: Served, body: bytes) -> None:
    with served(page.source.run.root, DashboardSettings(port=0, enable_actions=True)) as server:
        ask(server.port, "/api/v1/actions", from_page(server.port), method="POST", body=body).assert_refused(400)
        assert_others_are_served(server)


@pytest.mark.parametrize(
    "twice",
    ["Host: 127.0.0.1", "Authorization: Bearer x", "Origin: http://evil.example", "X-Megatrain-Request: 1",
     "Sec-Fetch-Site: same-origin", "Content-Type: text/plain"],
)  # fmt: skip
def test_a_header_twice_is_refused(page: Served, twice: str) -> None:
    headers = from_page(page.port) | bearer("y")
    raw = head_of("POST", "/api/v1/actions", headers, page.port, action())
    smuggled = raw.replace(b"\r\n\r\n", f"\r\n{twice}\r\n\r\n".encode(), 1)
    exchange(page.port, smuggled).assert_refused(400)
    assert_others_are_served(page)


@pytest.mark.parametrize(
    "lengths",
    [
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: gzip, chunked",
        "Content-Length: -1",
        "Content-Length : 5",
    ],
)
def test_two_lengths_are_refused(page: Served, lengths: str) -> None:
    raw = head_of("POST", "/api/v1/actions", from_page(page.port), page.port)
    smuggled = raw.replace(b"\r\n\r\n", f"\r\n{lengths}\r\n\r\n".encode(), 1) + b"0\r\n\r\n"
    reply = exchange(page.port, smuggled)
    assert reply.status in (400, 403, 413)
    reply.assert_refused(reply.status)
    assert reply.headers["connection"] == "close"
    assert_others_are_served(page)


def test_too_many_or_too_large_headers(page: Served) -> None:
    many = {f"X-{number}": "1" for number in range(80)}
    ask(page.port, JOB_PATH, many).assert_refused(431)
    ask(page.port, JOB_PATH, {"X-Large": "y" * 20_000}).assert_refused(431, "16384")
    ask(page.port, JOB_PATH, {"X-Large": "y" * 400_000}).assert_refused(400, "16384")
    ask(page.port, f"{JOB_PATH}?{'q' * 20_000}").assert_refused(431)
    exchange(page.port, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 TLS here\r\n\r\n").assert_refused(400)
    assert_others_are_served(page)


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A page without a bound on waiting questions."""
    settings = DashboardSettings(port=0, limits=HASTY)
    with served(tmp_path_factory.mktemp("hasty"), settings, more=[failing()]) as server:
        yield server


@pytest.mark.slow
def test_slow_clients_are_given_up(hasty: Served) -> None:
    """A head that never comes, or never ends; one after a first request; a body that never ends: all at a time."""
    slow_body = from_page(hasty.port) | {"Content-Length": "100"}
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
            client = stack.enter_context(connected(hasty.port))
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
        client.sendall(head_of("GET", "/api/v1/large", {}, hasty.port))
        assert_others_are_served(hasty)
        # nothing is read, so only a reset is seen: it does not wait behind what was sent
        poll = select.poll()
        poll.register(client, select.POLLERR | select.POLLHUP)
        # sooner than an idle connection would end anyway
        assert poll.poll(4000), "the connection is still there"
    assert_others_are_served(hasty)


@pytest.mark.slow
def test_there_is_an_end_to_what_is_left_unread(tmp_path: Path) -> None:
    """Answers of two clients that do not read are more than may wait: the one that has waited longer is dropped."""
    settings = DashboardSettings(port=0, limits=Limits(max_unread_bytes=40_000_000))
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
        # sooner than one that stalls would be dropped anyway
        assert polls[0].poll(4000), "the older connection is still there"
        assert not polls[1].poll(0), "the newer connection is gone as well"
        assert_others_are_served(server)


def test_there_is_an_end_to_connections(tmp_path: Path) -> None:
    settings = DashboardSettings(port=0, limits=Limits(max_connections=8))
    with served(tmp_path, settings) as server:
        with ExitStack() as stack:
            for _ in range(8):
                client = stack.enter_context(connected(server.port))
                client.sendall(head_of("GET", "/healthz", {}, server.port))
                assert read_reply(client).status == 200
            reply = exchange(server.port, head_of("GET", "/healthz", {}, server.port))
            reply.assert_refused(503, "8 connections")
            assert reply.headers["retry-after"]
        wait_until(lambda: ask(server.port, "/healthz").status == 200, "a free connection again")


def test_a_mistake_of_ours_shows_nothing(page: Served, caplog: pytest.LogCaptureFixture) -> None:
    ask(page.port, "/api/v1/broken").assert_refused(500, "its log has the details")
    assert b"passwd" not in ask(page.port, "/api/v1/broken").body
    assert "the secret of /etc/passwd" in caplog.text
    assert_others_are_served(page)


@pytest.mark.parametrize("query", ["?round=1", "?x=1", "?%3Cscript%3E=1", "?a&b", "?callback=alert"])
def test_a_parameter_that_is_not_known_is_refused(page: Served, query: str) -> None:
    ask(page.port, f"{JOB_PATH}{query}").assert_refused(400, "no such parameter")


def test_a_parameter_twice_is_refused(page: Served) -> None:
    ask(page.port, "/api/v1/series?points=100&points=200").assert_refused(400, "given twice")


def test_an_answer_of_the_parser_is_secured_too(page: Served) -> None:
    reply: Reply = exchange(page.port, b"nonsense\r\n\r\n")
    reply.assert_refused(400, "not an HTTP request")
