"""Attacks on a running server: each is refused as all are, and an ordinary client is served meanwhile."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path

import pytest
from fastapi import APIRouter
from starlette.responses import Response

from megatrain.config.dashboard import DashboardConfig
from megatrain.contracts.errors import ConfigError
from megatrain_diagnostics.dashboard.answers.errors import RefusalError
from megatrain_diagnostics.dashboard.security.attempts import Attempts
from megatrain_diagnostics.dashboard.security.identity import Identity
from megatrain_diagnostics.dashboard.settings import DashboardSettings, Limits, settings_of
from tests.helpers.dashboard_server import (
    OPERATOR_TOKEN,
    PAGE,
    VIEWER_TOKEN,
    Reply,
    Served,
    ask,
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
PROXY = ip_network("10.1.0.0/16")
HASTY = Limits(head_s=1.0, body_s=1.0, stall_s=0.5)
JOB_PATH = "/api/v1/job"


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


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A page that asks for tokens."""
    settings = DashboardSettings(
        port=0, viewer_token=VIEWER_TOKEN, operator_token=OPERATOR_TOKEN, enable_actions=True, limits=LIMITS
    )
    with served(tmp_path_factory.mktemp("locked"), settings) as server:
        yield server


def assert_others_are_served(server: Served, headers: Mapping[str, str] | None = None) -> None:
    reply = ask(server.port, JOB_PATH, headers)
    assert reply.status == 200
    reply.assert_secured()
    assert reply.json["job"] == "demo"


def test_an_open_page_is_for_viewers(page: Served) -> None:
    reply = ask(page.port, JOB_PATH)
    reply.assert_secured()
    assert reply.headers["cache-control"] == "no-store"
    assert reply.json["role"] == "viewer"
    assert not reply.json["can_act"]
    assert "--enable-actions" in reply.json["why_not_act"]
    act = ask(page.port, "/api/v1/actions", from_page(page.port), method="POST", body=action())
    act.assert_refused(403, "actions are off")


def action(**changed: object) -> bytes:
    wish = {
        "kind": "checkpoint", "reason": "before maintenance", "confirmation": "demo", "idempotency_key": "key-00000001",
    }  # fmt: skip
    return json.dumps({**wish, **changed}).encode()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("guessed-guessed-guessed"),
        bearer(""),
        {"Authorization": f"Basic {VIEWER_TOKEN}"},
        bearer(VIEWER_TOKEN[:-1]),
        {"Cookie": f"megatrain={VIEWER_TOKEN}"},
        {"X-Forwarded-User": "root"},
    ],
    ids=["none", "guessed", "empty", "another scheme", "a part", "token as cookie", "header of a proxy"],
)
def test_without_a_token_nothing_is_told(locked: Served, headers: Mapping[str, str]) -> None:
    settings = DashboardSettings(port=0, viewer_token=VIEWER_TOKEN, limits=LIMITS)
    with served(locked.source.run.root, settings) as server:
        for path in (JOB_PATH, "/api/v1/live", "/api/v1/audit", "/api/v1/openapi.json"):
            reply = ask(server.port, path, headers)
            reply.assert_refused(401)
            assert reply.headers["www-authenticate"].startswith("Bearer")
        ask(
            server.port, "/api/v1/actions", headers | from_page(server.port), method="POST", body=action()
        ).assert_refused(401)
        assert_others_are_served(server, bearer(VIEWER_TOKEN))


def test_a_token_is_refused_even_beside_a_session(locked: Served) -> None:
    login = ask(locked.port, "/api/v1/session", from_page(locked.port), method="POST", body=login_body(VIEWER_TOKEN))
    cookie = login.headers["set-cookie"].partition(";")[0]
    assert ask(locked.port, JOB_PATH, {"Cookie": cookie}).status == 200
    ask(locked.port, JOB_PATH, {"Cookie": cookie} | bearer("guessed")).assert_refused(401)


def login_body(token: str) -> bytes:
    return json.dumps({"token": token}).encode()


def test_each_token_has_its_role(locked: Served) -> None:
    assert ask(locked.port, JOB_PATH, bearer(VIEWER_TOKEN)).json["role"] == "viewer"
    assert ask(locked.port, JOB_PATH, bearer(OPERATOR_TOKEN)).json["role"] == "operator"
    headers = bearer(VIEWER_TOKEN) | {"Content-Type": "application/json"}
    ask(locked.port, "/api/v1/actions", headers, method="POST", body=action()).assert_refused(
        403, "viewers may only look"
    )


def test_who_guesses_tokens_has_to_wait() -> None:
    now_s = 1000.0
    identity = Identity(DashboardSettings(viewer_token=VIEWER_TOKEN, trusted_proxies=(PROXY,)), Attempts(3))
    for address in ("127.0.0.1", "10.1.0.7"):  # where others come from too
        for _ in range(10):
            with pytest.raises(RefusalError):
                identity.role_of_token("guessed", address, now_s)
        assert identity.role_of_token(VIEWER_TOKEN, address, now_s) == "viewer"
    for _ in range(3):
        with pytest.raises(RefusalError) as wrong:
            identity.role_of_token("guessed", "10.0.0.9", now_s)
        assert wrong.value.status == 401
    with pytest.raises(RefusalError) as late:
        identity.role_of_token(VIEWER_TOKEN, "10.0.0.9", now_s + 59.0)
    assert late.value.status == 429
    assert late.value.headers["Retry-After"] == "2"
    assert identity.role_of_token(VIEWER_TOKEN, "10.0.0.8", now_s) == "viewer"
    assert identity.role_of_token(VIEWER_TOKEN, "10.0.0.9", now_s + 60.0) == "viewer"


@pytest.mark.parametrize(
    "changed",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://evil.example@127.0.0.1:{port}"},
        {"Origin": "file://127.0.0.1:{port}"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "", "Sec-Fetch-Site": ""},
        {"X-Megatrain-Request": ""},
        {"X-Megatrain-Request": "2"},
    ],
)
def test_another_page_changes_nothing(page: Served, changed: Mapping[str, str]) -> None:
    settings = DashboardSettings(port=0, enable_actions=True)
    with served(page.source.run.root, settings) as server:
        told = {name: value.format(port=server.port) for name, value in changed.items()}
        headers = from_page(server.port) | told
        for method, path in (("POST", "/api/v1/actions"), ("POST", "/api/v1/session"), ("DELETE", "/api/v1/session")):
            ask(server.port, path, headers, method=method, body=action()).assert_refused(403)
        assert_others_are_served(server)


def test_a_page_of_ours_comes_to_the_action(page: Served) -> None:
    """Else the test above would see nothing: with all headers right, the refusal is about the job."""
    settings = DashboardSettings(port=0, enable_actions=True, operator_token=OPERATOR_TOKEN)
    with served(page.source.run.root, settings) as server:
        token = json.dumps({"token": OPERATOR_TOKEN}).encode()
        signed_in = ask(server.port, "/api/v1/session", from_page(server.port), method="POST", body=token)
        headers = from_page(server.port) | {"Cookie": signed_in.headers["set-cookie"].partition(";")[0]}
        reply = ask(server.port, "/api/v1/actions", headers, method="POST", body=action())
        reply.assert_refused(403, "nothing to act on")


def test_a_token_is_no_leave_for_another_page(locked: Served) -> None:
    headers = bearer(OPERATOR_TOKEN) | {"Content-Type": "application/json", "Origin": "http://evil.example"}
    ask(locked.port, "/api/v1/actions", headers, method="POST", body=action()).assert_refused(403, "Origin")


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_page_reads_nothing(page: Served, site: str) -> None:
    for path in (JOB_PATH, "/api/v1/live"):
        ask(page.port, path, {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}).assert_refused(
            403, "Sec-Fetch-Site"
        )
    link = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"}
    assert ask(page.port, JOB_PATH, link | {"Sec-Fetch-Dest": "document"}).status == 200
    ask(page.port, JOB_PATH, link | {"Sec-Fetch-Dest": "iframe"}).assert_refused(403, "Sec-Fetch-Site")
    assert ask(page.port, JOB_PATH, {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8777", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "[::2]",
     "127.0.0.1:80:80", "user@127.0.0.1", "127.0.0.1/", "xn--e1awd7f.com"],
)  # fmt: skip
def test_a_name_that_was_bound_anew_is_refused(page: Served, host: str) -> None:
    for path in ("/", JOB_PATH, "/healthz"):
        ask(page.port, path, {"Host": host}).assert_refused(403, "host_names")
    assert_others_are_served(page)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "LOCALHOST:9000", "[::1]:8777"])
def test_this_machine_has_its_names(page: Served, host: str) -> None:
    assert ask(page.port, JOB_PATH, {"Host": host}).status == 200


def test_further_names_are_told_in_the_configuration(tmp_path: Path) -> None:
    settings = replace(settings_of(DashboardConfig(host_names="Dash.example, other.example")), port=0)
    with served(tmp_path, settings) as server:
        assert ask(server.port, JOB_PATH, {"Host": "dash.example:443"}).status == 200
        ask(server.port, JOB_PATH, {"Host": "sub.dash.example"}).assert_refused(403)


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
    told = from_page(page.port) | {"Content-Length": str(10**12)}
    ask(page.port, "/api/v1/actions", told, method="POST", body=b"{}").assert_refused(413, "16384")
    assert_others_are_served(page)


def test_a_question_has_no_body(page: Served) -> None:
    ask(page.port, JOB_PATH, method="GET", body=b"{}").assert_refused(400, "no body")


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
    """A page that waits for nobody."""
    settings = DashboardSettings(port=0, limits=HASTY)
    with served(tmp_path_factory.mktemp("hasty"), settings, more=[failing()]) as server:
        yield server


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


def test_who_does_not_read_is_dropped(hasty: Served) -> None:
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
        wait_until(lambda: ask(server.port, "/healthz").status == 200, "room again", 5.0)


def test_a_mistake_of_ours_shows_nothing(page: Served, caplog: pytest.LogCaptureFixture) -> None:
    ask(page.port, "/api/v1/broken").assert_refused(500, "its log says more")
    assert b"passwd" not in ask(page.port, "/api/v1/broken").body
    assert "the secret of /etc/passwd" in caplog.text
    assert_others_are_served(page)


@pytest.mark.parametrize("query", ["?round=1", "?incarnation=1", "?x=1", "?%3Cscript%3E=1", "?a&b", "?callback=alert"])
def test_a_parameter_that_is_not_known_is_refused(page: Served, query: str) -> None:
    ask(page.port, f"{JOB_PATH}{query}").assert_refused(400, "no such parameter")


def test_a_parameter_twice_is_refused(page: Served) -> None:
    ask(page.port, "/api/v1/series?points=100&points=200").assert_refused(400, "given twice")


def test_a_proxy_is_believed_where_it_is_known(tmp_path: Path) -> None:
    known = DashboardSettings(
        port=0, trusted_proxies=(ip_network("127.0.0.1"),), user_header="x-user", role_header="x-role",
        operator_token=OPERATOR_TOKEN, enable_actions=True,
    )  # fmt: skip
    with served(tmp_path, known) as server:
        assert ask(server.port, JOB_PATH, {"X-User": "ada", "X-Role": "operator"}).json["role"] == "operator"
        assert ask(server.port, JOB_PATH, {"X-User": "ada"}).json["role"] == "viewer"
        ask(server.port, JOB_PATH, {"X-User": "ada", "X-Role": "root"}).assert_refused(403)
        ask(server.port, JOB_PATH).assert_refused(401)
        # a browser is behind it: what changes something has to come from our page
        headers = {"X-User": "ada", "X-Role": "operator", "Origin": "http://evil.example"}
        ask(server.port, "/api/v1/actions", headers, method="POST", body=action()).assert_refused(403, "Origin")
    elsewhere = replace(known, trusted_proxies=(ip_network("10.0.0.0/8"),))
    with served(tmp_path, elsewhere) as server:
        ask(server.port, JOB_PATH, {"X-User": "ada", "X-Role": "operator"}).assert_refused(401)
        assert_others_are_served(server, bearer(OPERATOR_TOKEN))


def test_below_a_base_path(tmp_path: Path) -> None:
    settings = DashboardSettings(port=0, base_path="/megatrain")
    with served(tmp_path, settings) as server:
        assert ask(server.port, "/megatrain/").body == PAGE
        assert ask(server.port, "/megatrain/api/v1/job").status == 200
        moved = ask(server.port, "/megatrain")
        assert (moved.status, moved.headers["location"]) == (308, "/megatrain/")
        moved.assert_secured()
        # a proxy that takes the path away
        assert ask(server.port, JOB_PATH).status == 200


NOT_STARTED = {
    "from elsewhere without tokens": (
        {"address": "0.0.0.0"},
        "is reached from other machines and needs to know who asks",
    ),
    "a name without tokens": ({"address": "node-7"}, "viewer_token_file or operator_token_file"),
    "proxies that name nobody": ({"trusted_proxies": "10.0.0.1"}, "needs dashboard.user_header"),
    "everybody is a proxy": ({"trusted_proxies": "0.0.0.0/0", "user_header": "X-User"}, "is everybody"),
    "no network": ({"trusted_proxies": "10.0.0.300", "user_header": "X-User"}, "is no address or network"),
    "a header from anybody": ({"user_header": "X-User"}, "does nothing without dashboard.trusted_proxies"),
    "one header for both": (
        {"trusted_proxies": "10.0.0.1", "user_header": "X-User", "role_header": "x-user"},
        "name two headers",
    ),
    "a header that is none": ({"trusted_proxies": "10.0.0.1", "user_header": "X User"}, "text of the form"),
    "a path that is none": ({"base_path": "/a/../b c"}, "text of the form"),
    "a script as an address": ({"perfetto_url": "javascript:alert(1)"}, "text of the form"),
}


@pytest.mark.parametrize(("section", "message"), NOT_STARTED.values(), ids=NOT_STARTED)
def test_an_unsafe_configuration_is_not_started(section: Mapping[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        settings_of(replace(DashboardConfig(), **section))  # type: ignore[arg-type]


def make_token(path: Path, token: str, mode: int = 0o600) -> str:
    path.write_text(f"{token}\n")
    path.chmod(mode)
    return str(path)


def test_a_token_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    good = make_token(tmp_path / "good", VIEWER_TOKEN)
    assert settings_of(DashboardConfig(viewer_token_file=good)).viewer_token == VIEWER_TOKEN
    assert VIEWER_TOKEN not in repr(settings_of(DashboardConfig(viewer_token_file=good)))
    for mode in (0o644, 0o640, 0o604):
        told = make_token(tmp_path / "open", VIEWER_TOKEN, mode)
        with pytest.raises(ConfigError, match=f"mode {mode:04o}: others may read it"):
            settings_of(DashboardConfig(operator_token_file=told))
    with pytest.raises(ConfigError, match="could be guessed"):
        settings_of(DashboardConfig(viewer_token_file=make_token(tmp_path / "short", "secret")))
    with pytest.raises(ConfigError, match="no header carries"):
        settings_of(DashboardConfig(viewer_token_file=make_token(tmp_path / "words", "two words are too many")))
    with pytest.raises(ConfigError, match="cannot be read"):
        settings_of(DashboardConfig(viewer_token_file=str(tmp_path / "nowhere")))
    both = make_token(tmp_path / "both", VIEWER_TOKEN)
    with pytest.raises(ConfigError, match="hold the same token"):
        settings_of(DashboardConfig(viewer_token_file=good, operator_token_file=both))
    with pytest.raises(ConfigError, match="name two files"):
        settings_of(DashboardConfig(viewer_token_file=good, operator_token_file=good))
    with pytest.raises(ConfigError, match="nobody can be one"):
        settings_of(DashboardConfig(viewer_token_file=good, enable_actions=True))


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as wrong:
        settings_of(DashboardConfig(address="0.0.0.0", user_header="X-User", base_path="x"))
    assert len(wrong.value.problems) == 3


def test_an_answer_of_the_parser_is_secured_too(page: Served) -> None:
    reply: Reply = exchange(page.port, b"nonsense\r\n\r\n")
    reply.assert_refused(400, "not an HTTP request")
