"""Access to a running server: tokens, roles, requests of other pages, DNS rebinding, proxies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path

import pytest

from megatrain.config.dashboard import DashboardConfig
from megatrain_dashboard.responses.errors import RefusalError
from megatrain_dashboard.security.authenticator import Attempts, Authenticator
from megatrain_dashboard.security.origins import Origins
from megatrain_dashboard.settings import DashboardSettings, Limits, settings_of
from tests.helpers.dashboard_server import (
    JOB_PATH,
    OPERATOR_TOKEN,
    PAGE,
    VIEWER_TOKEN,
    Served,
    action,
    assert_others_are_served,
    bearer,
    served,
    session_headers,
)

LIMITS = Limits(max_wrong_tokens=3)
PROXY = ip_network("10.1.0.0/16")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An open page on loopback, with the default configuration."""
    settings = DashboardSettings(port=0, limits=LIMITS)
    with served(tmp_path_factory.mktemp("open"), settings) as server:
        yield server


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A page that requires tokens."""
    settings = DashboardSettings(
        port=0, viewer_token=VIEWER_TOKEN, operator_token=OPERATOR_TOKEN, enable_actions=True, limits=LIMITS
    )
    with served(tmp_path_factory.mktemp("locked"), settings) as server:
        yield server


def test_an_open_page_is_for_viewers(page: Served) -> None:
    reply = page.ask(JOB_PATH)
    reply.assert_secured()
    assert reply.headers["cache-control"] == "no-store"
    assert reply.json["role"] == "viewer"
    assert not reply.json["can_act"]
    assert "--enable-actions" in reply.json["why_not_act"]
    act = page.ask("/api/v1/actions", page.from_page(), method="POST", body=action())
    act.assert_refused(403, "actions are off")


def test_request_without_a_token_is_refused(locked: Served) -> None:
    for name, headers in {
        "none": {},
        "guessed": bearer("guessed-guessed-guessed"),
        "empty": bearer(""),
        "another scheme": {"Authorization": f"Basic {VIEWER_TOKEN}"},
        "a part": bearer(VIEWER_TOKEN[:-1]),
        "token as cookie": {"Cookie": f"megatrain={VIEWER_TOKEN}"},
        "header of a proxy": {"X-Forwarded-User": "root"},
    }.items():
        for path in (JOB_PATH, "/api/v1/live", "/api/v1/audit", "/api/v1/openapi.json"):
            reply = locked.ask(path, headers)
            reply.assert_refused(401, where=(name, path))
            assert reply.headers["www-authenticate"].startswith("Bearer")
        given = headers | locked.from_page()
        reply = locked.ask("/api/v1/actions", given, method="POST", body=action())
        reply.assert_refused(401, where=name)
    assert_others_are_served(locked, bearer(VIEWER_TOKEN))


def test_a_token_is_refused_even_beside_a_session(locked: Served) -> None:
    session = session_headers(locked.log_in(VIEWER_TOKEN))
    assert locked.ask(JOB_PATH, session).status == 200
    locked.ask(JOB_PATH, session | bearer("guessed")).assert_refused(401)


def test_cookie_alone_is_refused(locked: Served) -> None:
    """A browser sends the cookie to all servers of this host. One of them replays it with forged headers."""
    session = session_headers(locked.log_in(OPERATOR_TOKEN))
    other = locked.log_in(OPERATOR_TOKEN)
    cookie = {"Cookie": session["Cookie"]}
    for stolen in (
        cookie,
        cookie | {"X-Megatrain-Session": ""},
        cookie | {"X-Megatrain-Session": session_headers(other)["X-Megatrain-Session"]},
        cookie | {"X-Megatrain-Session": session["Cookie"].rpartition(".")[2]},
        {"X-Megatrain-Session": session["X-Megatrain-Session"]},
    ):
        forged = locked.from_page() | stolen
        for path in (JOB_PATH, "/api/v1/live", "/api/v1/audit"):
            locked.ask(path, forged).assert_refused(401)
        locked.ask("/api/v1/actions", forged, method="POST", body=action()).assert_refused(401)
        locked.ask("/api/v1/session", forged, method="DELETE")
        assert locked.ask(JOB_PATH, session).status == 200, "no other caller ends the session"


def test_each_token_has_its_role(locked: Served) -> None:
    assert locked.ask(JOB_PATH, bearer(VIEWER_TOKEN)).json["role"] == "viewer"
    assert locked.ask(JOB_PATH, bearer(OPERATOR_TOKEN)).json["role"] == "operator"
    headers = bearer(VIEWER_TOKEN) | {"Content-Type": "application/json"}
    locked.ask("/api/v1/actions", headers, method="POST", body=action()).assert_refused(403, "viewers may only read")


def test_token_guesses_are_delayed() -> None:
    now_s = 1000.0
    authenticator = Authenticator(DashboardSettings(viewer_token=VIEWER_TOKEN, trusted_proxies=(PROXY,)), Attempts(3))
    for address in ("127.0.0.1", "10.1.0.7"):  # The address is shared by many users, so it is never delayed.
        for _ in range(10):
            with pytest.raises(RefusalError):
                authenticator.role_of_token("guessed", address, now_s)
        assert authenticator.role_of_token(VIEWER_TOKEN, address, now_s) == "viewer"
    for address in ("10.0.0.7", "10.0.0.9") * 3:
        with pytest.raises(RefusalError) as wrong:
            authenticator.role_of_token("guessed", address, now_s)
        assert wrong.value.status == 401
    with pytest.raises(RefusalError) as late:
        authenticator.role_of_token(VIEWER_TOKEN, "10.0.0.9", now_s + 59.0)
    assert late.value.status == 429
    assert late.value.headers["Retry-After"] == "2"
    assert authenticator.role_of_token(VIEWER_TOKEN, "10.0.0.8", now_s) == "viewer"
    assert authenticator.role_of_token(VIEWER_TOKEN, "10.0.0.9", now_s + 60.0) == "viewer"
    for number in range(5000):  # more addresses than are remembered: the oldest are forgotten
        with pytest.raises(RefusalError):
            authenticator.role_of_token("guessed", f"10.2.{number // 256}.{number % 256}", now_s)
    assert authenticator.role_of_token(VIEWER_TOKEN, "10.0.0.7", now_s) == "viewer"


FOREIGN = (
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
)


def test_another_page_changes_nothing(page: Served) -> None:
    settings = DashboardSettings(port=0, enable_actions=True)
    with served(page.source.run.root, settings) as server:
        assert server.ask(JOB_PATH).json["role"] == "viewer"
        for changed in FOREIGN:
            reported = {name: value.format(port=server.port) for name, value in changed.items()}
            headers = server.from_page() | reported
            for method, path in (
                ("POST", "/api/v1/actions"), ("POST", "/api/v1/session"), ("DELETE", "/api/v1/session"),
            ):  # fmt: skip
                reply = server.ask(path, headers, method=method, body=action())
                reply.assert_refused(403, where=(changed, method, path))
        assert_others_are_served(server)


def test_request_of_the_own_page_is_accepted(locked: Served) -> None:
    """The counterpart of the test above: with all headers right, the refusal is about the job."""
    headers = locked.from_page() | session_headers(locked.log_in(OPERATOR_TOKEN))
    reply = locked.ask("/api/v1/actions", headers, method="POST", body=action())
    reply.assert_refused(403, "actions need a running job")


def test_page_without_tokens_has_no_login(page: Served) -> None:
    reply = page.log_in("anything")
    reply.assert_refused(409, "no tokens")


def test_token_from_another_page_is_refused(locked: Served) -> None:
    headers = bearer(OPERATOR_TOKEN) | {"Content-Type": "application/json", "Origin": "http://evil.example"}
    locked.ask("/api/v1/actions", headers, method="POST", body=action()).assert_refused(403, "Origin")


def test_another_page_reads_nothing(page: Served) -> None:
    for site in ("cross-site", "same-site"):
        for path in (JOB_PATH, "/api/v1/live"):
            reply = page.ask(path, {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"})
            reply.assert_refused(403, "Sec-Fetch-Site", where=(site, path))
        link = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"}
        assert page.ask(JOB_PATH, link | {"Sec-Fetch-Dest": "document"}).status == 200, site
        page.ask(JOB_PATH, link | {"Sec-Fetch-Dest": "iframe"}).assert_refused(403, "Sec-Fetch-Site")
    assert page.ask(JOB_PATH, {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}).status == 200


def test_dns_rebinding_is_refused(page: Served) -> None:
    for host in (
        "evil.example", "evil.example:8777", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "[::2]",
        "127.0.0.1:80:80", "user@127.0.0.1", "127.0.0.1/", "xn--e1awd7f.com",
    ):  # fmt: skip
        for path in ("/", JOB_PATH, "/healthz"):
            reply = page.ask(path, {"Host": host})
            reply.assert_refused(403, "host_names", where=(host, path))
    assert_others_are_served(page)


def test_names_of_this_machine_are_accepted(page: Served) -> None:
    for host in ("localhost", "127.0.0.1", "LOCALHOST:9000", "[::1]:8777"):
        assert page.ask(JOB_PATH, {"Host": host}).status == 200, host


def test_server_at_all_addresses_accepts_any_address_as_host() -> None:
    origins = Origins(DashboardSettings(address="0.0.0.0"))
    for host in ("10.1.2.3", "192.0.2.7:8777", "[2001:db8::7]:8777"):
        origins.check_host(host)
    for host in ("evil.example", "10.1.2.3.evil.example:8777"):
        with pytest.raises(RefusalError, match="not a name of this dashboard"):
            origins.check_host(host)


def test_configured_host_names_are_accepted(tmp_path: Path) -> None:
    settings = replace(settings_of(DashboardConfig(host_names="Dash.example, other.example")), port=0)
    with served(tmp_path, settings) as server:
        assert server.ask(JOB_PATH, {"Host": "dash.example:443"}).status == 200
        server.ask(JOB_PATH, {"Host": "sub.dash.example"}).assert_refused(403)


def test_headers_of_trusted_proxies_only_are_used(tmp_path: Path) -> None:
    known = DashboardSettings(
        port=0, trusted_proxies=(ip_network("127.0.0.1"),), user_header="x-user", role_header="x-role",
        operator_token=OPERATOR_TOKEN, enable_actions=True,
    )  # fmt: skip
    with served(tmp_path, known) as server:
        assert server.ask(JOB_PATH, {"X-User": "ada", "X-Role": "operator"}).json["role"] == "operator"
        assert server.ask(JOB_PATH, {"X-User": "ada"}).json["role"] == "viewer"
        server.ask(JOB_PATH, {"X-User": "ada", "X-Role": "root"}).assert_refused(403)
        server.ask(JOB_PATH).assert_refused(401)
        # A browser sent it: a request with effects must come from our page.
        headers = {"X-User": "ada", "X-Role": "operator", "Origin": "http://evil.example"}
        server.ask("/api/v1/actions", headers, method="POST", body=action()).assert_refused(403, "Origin")
    elsewhere = replace(known, trusted_proxies=(ip_network("10.0.0.0/8"),))
    with served(tmp_path, elsewhere) as server:
        server.ask(JOB_PATH, {"X-User": "ada", "X-Role": "operator"}).assert_refused(401)
        assert_others_are_served(server, bearer(OPERATOR_TOKEN))


@pytest.mark.slow
def test_below_a_base_path(tmp_path: Path) -> None:
    settings = DashboardSettings(port=0, base_path="/megatrain")
    with served(tmp_path, settings) as server:
        assert server.ask("/megatrain/").body == PAGE
        assert server.ask("/megatrain/api/v1/job").status == 200
        moved = server.ask("/megatrain")
        assert (moved.status, moved.headers["location"]) == (308, "/megatrain/")
        moved.assert_secured()
        # a proxy that removes the path
        assert server.ask(JOB_PATH).status == 200
