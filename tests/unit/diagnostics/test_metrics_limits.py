"""Clients of /metrics cannot exhaust its memory, and cannot take the scraper's connection."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from megatrain_diagnostics.metrics import server
from megatrain_diagnostics.metrics.exposition import HostCollector, registry_of
from megatrain_diagnostics.metrics.server import MetricsServer
from tests.helpers.metric_readings import make_host_reading
from tests.helpers.slow_peer import is_ended_when_sent
from tests.helpers.waiting import DEADLINE_S, wait_until


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    listening = MetricsServer(registry_of(HostCollector(make_host_reading)), "127.0.0.1", 0)
    yield listening.port
    listening.close()


def scrape(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer:
        content: bytes = answer.read()
    return content


@pytest.mark.slow
def test_silent_connections_do_not_block_scrapers(port: int) -> None:
    before = threading.active_count()
    with ExitStack() as opened:
        for _ in range(10 * server.MAX_CONNECTIONS):
            opened.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert b"megatrain_" in scrape(port)
        # a thread whose connection was ended needs a moment to notice
        wait_until(lambda: threading.active_count() - before <= server.MAX_CONNECTIONS + 1, "few threads")


def test_slow_request_is_ended(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.2)
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        wait_until(lambda: is_ended_when_sent(slow, b"x"), "the server to end the request")
    assert b"megatrain_" in scrape(port)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /metrics?" + b"x" * 60_000 + b" HTTP/1.1",
        b"GET /metrics HTTP/1.1" + b"".join(b"\r\nX-%d: %b" % (number, b"y" * 60_000) for number in range(90)),
    ],
)
def test_a_long_head_is_not_kept(port: int, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rb") as answer:
        with suppress(ConnectionError):
            connection.sendall(head + b"\r\n\r\n")
        with suppress(ConnectionError):
            assert answer.readline().split()[1] not in (b"200", b"404")
    assert b"megatrain_" in scrape(port)
