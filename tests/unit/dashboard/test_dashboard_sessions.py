"""Logging in with a browser: the attributes of the cookie, when it is valid, and which cookies are refused."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from megatrain_dashboard.security.roles import Role
from megatrain_dashboard.security.sessions import Sessions
from megatrain_dashboard.settings import DashboardSettings
from tests.helpers.dashboard_server import OPERATOR_TOKEN, VIEWER_TOKEN, Reply, Served, served, session_headers

SETTINGS = DashboardSettings(port=0, viewer_token=VIEWER_TOKEN, operator_token=OPERATOR_TOKEN, enable_actions=True)
JOB_PATH = "/api/v1/job"
NOW_S = 1_700_000_000.0


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("run"), SETTINGS) as server:
        yield server


def cookie_of(reply: Reply) -> str:
    return reply.headers["set-cookie"].partition(";")[0]


def test_a_token_becomes_a_session(locked: Served) -> None:
    for token, role in ((VIEWER_TOKEN, "viewer"), (OPERATOR_TOKEN, "operator")):
        reply = locked.log_in(token)
        reply.assert_secured()
        assert reply.json["role"] == role
        reported = reply.headers["set-cookie"]
        assert reply.json["page_secret"] not in reported
        assert re.fullmatch(r"megatrain-[0-9a-f]{12}=[^;]+; Path=/; Max-Age=43200; HttpOnly; SameSite=Strict", reported)
        assert token not in reported
        session = session_headers(reply)
        job = locked.ask(JOB_PATH, session | {"Cookie": f"other=1; {session['Cookie']}"}).json
        assert (job["role"], job["has_session"]) == (role, True)


def test_logout_removes_the_cookie(locked: Served) -> None:
    reply = locked.ask("/api/v1/session", locked.from_page(), method="DELETE")
    assert reply.status == 204
    assert "Max-Age=0" in reply.headers["set-cookie"]
    assert cookie_of(reply) == f"{SETTINGS.cookie_name}="
    locked.ask(JOB_PATH, {"Cookie": cookie_of(reply)}).assert_refused(401)


def test_a_copy_of_a_cookie_ends_with_its_session(locked: Served) -> None:
    ours, others = (session_headers(locked.log_in(VIEWER_TOKEN)) for _ in range(2))
    locked.ask("/api/v1/session", locked.from_page() | ours, method="DELETE")
    locked.ask(JOB_PATH, ours).assert_refused(401)
    assert locked.ask(JOB_PATH, others).status == 200


def test_guessing_tokens_by_the_cookie_name_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every client sees the name. A plain digest of the tokens would permit millions of guesses a second."""
    cheap = "\n".join(("name of the cookie", VIEWER_TOKEN, OPERATOR_TOKEN, ""))
    assert hashlib.sha256(cheap.encode()).hexdigest()[:12] not in SETTINGS.cookie_name
    costs, scrypt = [], hashlib.scrypt

    def counted(*arguments: Any, n: int, r: int, p: int, **options: Any) -> bytes:
        costs.append(n * r * p)
        return scrypt(*arguments, n=n, r=r, p=p, **options)

    guess = replace(SETTINGS, viewer_token="a-guess-that-no-other-test-makes")
    with monkeypatch.context() as patched:
        patched.setattr(hashlib, "scrypt", counted)
        assert guess.cookie_name == replace(guess).cookie_name
    assert costs == [2**17], "blocks that each guess mixes; a process computes its own name once"
    # Two dashboards of one machine have two cookies.
    assert SETTINGS.cookie_name != replace(SETTINGS, viewer_token="another-token-of-the-tests").cookie_name


def test_wrong_token_and_malformed_login_are_refused(locked: Served) -> None:
    for token in ("guessed", " ", VIEWER_TOKEN[:-1], VIEWER_TOKEN + "x", "\u00e9" * 20):
        reply = locked.log_in(token)
        reply.assert_refused(401, where=token)
        assert "set-cookie" not in reply.headers, token
    for body in (b"{}", b'{"token": 1}', b'{"token": ""}', b'{"token": "x", "role": "operator"}'):
        reply = locked.ask("/api/v1/session", locked.from_page(), method="POST", body=body)
        reply.assert_refused(400, where=body)


def value_of(cookie: str) -> str:
    return cookie.partition(";")[0].partition("=")[2]


def test_session_is_valid_until_its_end() -> None:
    sessions = Sessions(SETTINGS)
    cookie, secret = sessions.new_session(Role.VIEWER, NOW_S, is_secure=False)
    cookie = cookie.partition(";")[0]
    found = sessions.session_of(cookie, secret, NOW_S + 43_199)
    assert found is not None
    assert (found.role, found.ends_unix_s) == (Role.VIEWER, int(NOW_S) + 43_200)
    assert sessions.session_of(cookie, secret, NOW_S + 43_200) is None


def test_a_session_survives_the_server_and_ends_with_its_token() -> None:
    cookie, secret = Sessions(SETTINGS).new_session(Role.OPERATOR, NOW_S, is_secure=False)
    again = Sessions(SETTINGS).session_of(cookie.partition(";")[0], secret, NOW_S)
    assert again is not None
    assert again.role is Role.OPERATOR
    changed = replace(SETTINGS, operator_token="another-token-of-the-tests")
    renamed = f"{changed.cookie_name}={value_of(cookie)}"
    assert Sessions(changed).session_of(renamed, secret, NOW_S) is None
    without = replace(SETTINGS, operator_token="")
    assert Sessions(without).session_of(f"{without.cookie_name}={value_of(cookie)}", secret, NOW_S) is None


def test_unsigned_session_is_refused() -> None:
    sessions, name = Sessions(SETTINGS), SETTINGS.cookie_name
    cookie, secret = sessions.new_session(Role.VIEWER, NOW_S, is_secure=False)
    value = value_of(cookie)
    version, role, ends, nonce, signature = value.split(".")
    forged = [
        f"{version}.operator.{ends}.{nonce}.{signature}",
        f"{version}.{role}.{int(ends) + 1}.{nonce}.{signature}",
        f"{version}.{role}.{ends}.00000000.{signature}",
        f"1.{role}.{ends}.{nonce}.{signature}",
        f"{version}.{role}.{ends}.{nonce}.{signature[:-1]}0" + ("1" if signature.endswith("0") else ""),
        f"{version}.{role}.{ends}.{nonce}.",
        f"{version}.{role}.{ends}.{nonce}",
        f"{version}.root.{ends}.{nonce}.{signature}",
        f"{version}.{role}.{ends}.{nonce}.\u00e9",
        "",
        "." * 50,
        "x" * 100_000,
    ]
    for wrong in forged:
        assert sessions.session_of(f"{name}={wrong}", secret, NOW_S) is None, wrong
    for wrong in ("", secret[:-1], secret + "0", "\u00e9", "x" * 100_000):
        assert sessions.session_of(f"{name}={value}", wrong, NOW_S) is None, wrong
    assert sessions.session_of(f"{name}={value}", secret, NOW_S) is not None


def test_only_the_newest_ended_sessions_are_stored() -> None:
    sessions, begun = Sessions(SETTINGS), []
    for _ in range(5000):
        cookie, secret = sessions.new_session(Role.VIEWER, NOW_S, is_secure=False)
        begun.append((cookie.partition(";")[0], secret))
        sessions.end_session(*begun[-1], NOW_S, is_secure=False)
    found = [sessions.session_of(cookie, secret, NOW_S) is None for cookie, secret in begun]
    assert found == [False] * 904 + [True] * 4096


def test_foreign_cookies_do_not_hide_the_session() -> None:
    """Another server of this machine, at another port, may set any cookie."""
    sessions = Sessions(SETTINGS)
    cookie, secret = sessions.new_session(Role.VIEWER, NOW_S, is_secure=False)
    beside = f"{SETTINGS.cookie_name}=tossed; a=b=c; =; {cookie.partition(';')[0]}; x"
    assert sessions.session_of(beside, secret, NOW_S) is not None


def test_cookie_behind_https_is_secure(locked: Served, tmp_path: Path) -> None:
    proxied = replace(SETTINGS, trusted_proxies=(ip_network("127.0.0.0/8"),), user_header="x-user", base_path="/mt")
    body = json.dumps({"token": VIEWER_TOKEN}).encode()
    with served(tmp_path, proxied) as server:
        headers = server.from_page() | {"X-Forwarded-Proto": "https"}
        reported = server.ask("/mt/api/v1/session", headers, method="POST", body=body).headers["set-cookie"]
        assert reported.endswith("SameSite=Strict; Secure")
        assert "Path=/mt;" in reported
    headers = locked.from_page() | {"X-Forwarded-Proto": "https"}  # not from a trusted proxy
    reported = locked.ask("/api/v1/session", headers, method="POST", body=body).headers["set-cookie"]
    assert "Secure" not in reported
