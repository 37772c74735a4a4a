"""The program: its address, its exit, the command lines that it refuses; caching and limits of its responses."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from megatrain.config.dashboard import DashboardConfig
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.diag_records import DashboardRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode, encode
from megatrain_dashboard.responses.cache import CachedResponse, ResponseCache, cached_response
from megatrain_dashboard.responses.errors import RefusalError
from megatrain_dashboard.responses.heavy import Download, HeavyQueries
from megatrain_dashboard.server import listening_socket, url_of
from megatrain_dashboard.settings import DashboardSettings
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from tests.helpers.dashboard_server import (
    VIEWER_TOKEN,
    PageClient,
    Served,
    bearer,
    head_of,
    read_head,
    read_rest,
    served,
)
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.launched_job import make_host, make_record, make_round, make_snapshot
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S, wait_until


def taken_port() -> socket.socket:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return taken


def test_requested_port_is_used_or_refused() -> None:
    with taken_port() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port={port}: cannot listen there: Address already in use; name"):
            listening_socket(DashboardSettings(port=port, is_port_asked=True))
        with pytest.raises(ConfigError, match=f"port={port}: "):  # of the configuration, not the default
            listening_socket(DashboardSettings(port=port))
    with pytest.raises(ConfigError, match="cannot listen there"):
        listening_socket(DashboardSettings(address="192.0.2.1"))


def test_default_port_moves_on_if_it_is_taken() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(listening_socket(DashboardSettings()))
        second = stack.enter_context(listening_socket(DashboardSettings()))
        ports = [one.getsockname()[1] for one in (first, second)]
        assert 8777 <= ports[0] < ports[1] < 8797
        assert first.proto == socket.IPPROTO_TCP, "small answers would wait 40 ms for an acknowledgment"
        with pytest.raises(ConfigError, match=f"port={ports[0]}: "):
            listening_socket(DashboardSettings(port=ports[0], is_port_asked=True))


def test_url_of_the_page_is_reachable() -> None:
    with listening_socket(DashboardSettings(port=0)) as listening:
        port = listening.getsockname()[1]
        assert url_of(DashboardSettings(), listening) == f"http://127.0.0.1:{port}/"
        assert url_of(DashboardSettings(address="::1", base_path="/mt"), listening) == f"http://[::1]:{port}/mt/"
        assert url_of(DashboardSettings(address="0.0.0.0"), listening) == f"http://{socket.gethostname()}:{port}/"


@pytest.mark.slow
def test_the_server_ends_with_streams_and_slow_answers_open(tmp_path: Path) -> None:
    routes = APIRouter()

    @routes.get("/api/v1/endless")
    async def endless() -> Response:
        await asyncio.Event().wait()
        return Response()

    with ExitStack() as stack:
        server = stack.enter_context(served(tmp_path, DashboardSettings(port=0), more=[routes]))
        streams = [stack.enter_context(server.connected()) for _ in range(5)]
        for client in streams:
            client.sendall(head_of("GET", "/api/v1/live", {}, server.port))
            read_head(client)
        slow = stack.enter_context(server.connected())
        slow.sendall(head_of("GET", "/api/v1/endless", {}, server.port))
        assert server.server.close()
        for client in streams:  # They are ended properly, not aborted.
            assert read_rest(client).endswith(b"0\r\n\r\n")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("run"), DashboardSettings(port=0, viewer_token=VIEWER_TOKEN)) as server:
        yield server


def test_health_is_answered_without_authentication(guarded: Served) -> None:
    assert (guarded.ask("/healthz").status, guarded.ask("/readyz").status) == (200, 503)
    assert guarded.ask("/readyz").json == {"is_ready": False}
    guarded.source.reported = make_snapshot()
    assert (guarded.ask("/healthz").status, guarded.ask("/readyz").status) == (200, 200)
    guarded.ask("/readyz").assert_secured()


def test_the_api_describes_itself(guarded: Served) -> None:
    reported = guarded.ask("/api/v1/openapi.json", bearer(VIEWER_TOKEN)).json
    paths = reported["paths"]
    expected = {
        "job", "overview", "series", "incidents", "audit", "hosts", "checkpoints", "logs", "stragglers", "whatif",
        "hang", "heat", "grid", "timeline", "live", "session", "actions",
    }  # fmt: skip
    assert expected <= {path.removeprefix("/api/v1/") for path in paths}
    assert all(path.startswith("/api/v1/") or path in ("/healthz", "/readyz") for path in paths)
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert operation.get("description"), f"{method} {path} says nothing"
            if path.startswith("/api/"):
                assert "ErrorDocument" in json.dumps(operation["responses"]["default"]), path
    assert {"get"} == set(paths["/api/v1/overview"])
    assert {"post", "delete"} == set(paths["/api/v1/session"])
    page = ROOT / "docs" / "reference" / "openapi.json"
    again = f"write it again: python -m megatrain_dashboard.openapi --output {page}"
    assert json.loads(page.read_text(encoding="ascii")) == reported, again


def test_concurrent_requests_make_a_response_once() -> None:
    responses, num_made, may_end = ResponseCache(), [], threading.Event()

    def make() -> bytes:
        num_made.append(1)
        assert may_end.wait(DEADLINE_S)
        return b"body"

    with ThreadPoolExecutor(50) as pool:
        futures = [pool.submit(responses.get, "overview", make, fresh_s=60.0) for _ in range(50)]
        may_end.set()
        assert {future.result(DEADLINE_S).body for future in futures} == {b"body"}
    assert len(num_made) == 1


def test_cached_response_expires() -> None:
    now_s = [0.0]
    responses = ResponseCache(clock=lambda: now_s[0])
    first = responses.get("a", lambda: b"1", fresh_s=1.0)
    now_s[0] = 1.0
    assert responses.get("a", lambda: b"2", fresh_s=1.0) is first
    now_s[0] = 1.5
    second = responses.get("a", lambda: b"2", fresh_s=1.0)
    assert (second.body, second.etag != first.etag) == (b"2", True)
    now_s[0] = 1e9
    assert responses.get("a", lambda: b"3") is second


def test_error_reaches_every_client_and_is_not_cached() -> None:
    responses, may_end = ResponseCache(), threading.Event()

    def broken() -> bytes:
        assert may_end.wait(DEADLINE_S)
        raise ValueError("no such round")

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(responses.get, "a", broken) for _ in range(4)]
        may_end.set()
        for future in futures:
            with pytest.raises(ValueError, match="no such round"):
                future.result(DEADLINE_S)
    assert responses.get("a", lambda: b"good").body == b"good"


def test_memory_of_cached_responses_is_bounded() -> None:
    responses = ResponseCache(capacity_bytes=1000)
    for name in ("a", "b", "c"):
        responses.get(name, lambda: b"x" * 400)
    responses.get("b", lambda: b"y" * 400)  # used again, so that c is the oldest
    responses.get("d", lambda: b"x" * 400)
    assert responses.get("b", lambda: b"made again").body == b"x" * 400
    assert responses.get("c", lambda: b"made again").body == b"made again"
    assert responses.get("large", lambda: b"x" * 5000).body == b"x" * 5000
    assert responses.get("d", lambda: b"made again").body == b"made again"


def test_known_response_is_not_sent_again() -> None:
    def asked(etag: str) -> Response:
        request = Request({"type": "http", "headers": [(b"if-none-match", etag.encode())]})
        return cached_response(request, CachedResponse(b"body", '"1"', 0.0))

    assert (asked('"1"').status_code, asked('W/"1", "2"').status_code) == (304, 304)
    assert (asked('"2"').status_code, asked('"2"').body) == (200, b"body")


def test_heavy_queries_wait_for_a_slot(tmp_path: Path) -> None:
    heavy = HeavyQueries(num_running=1, num_waiting=1, wait_s=0.05)

    async def scenario() -> list[int]:
        async def asked(hold: asyncio.Event | None = None) -> int:
            turn = heavy.slot()
            try:
                await anext(turn)
            except RefusalError as refusal:
                return refusal.status if "Retry-After" in refusal.headers else 0
            if hold is not None:
                await hold.wait()
            await turn.aclose()
            return 200

        may_end = asyncio.Event()
        running = asyncio.create_task(asked(may_end))
        # The second one waits behind the first, until its time is over; the third cannot wait: the queue is full.
        waiting, third = asyncio.create_task(asked()), asyncio.create_task(asked())
        found = [await third, await waiting]
        may_end.set()
        return [*found, await running, await asked()]

    assert asyncio.run(scenario()) == [503, 503, 200, 200]


@pytest.mark.parametrize("has_gone", [True, False])
def test_ended_download_closes_its_generator(has_gone: bool) -> None:
    def endless() -> Generator[str]:
        while True:
            yield "piece"

    pieces = endless()

    async def scenario() -> None:
        began = asyncio.Event()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                began.set()
                await asyncio.Event().wait()  # It is never accepted.

        async def receive() -> Message:
            await began.wait()
            if not has_gone:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        download = Download(pieces, "text/csv", "a.csv", most_s=DEADLINE_S if has_gone else 0.05)
        with suppress(TimeoutError):
            await download({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)

    asyncio.run(scenario())
    assert inspect.getgeneratorstate(pieces) == inspect.GEN_CLOSED


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    with EtcdServers(tmp_path_factory.mktemp("etcd")) as servers:
        yield servers


def started(*arguments: str, directory: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "launcher", "diagnostics")),
    }
    return subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=directory, env=environment, stderr=subprocess.PIPE, text=True
    )


def line_with(process: subprocess.Popen[str], text: str) -> str:
    """Return the first line on stderr that contains a text."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            return line
    raise AssertionError(f"ended with {process.wait()}:\n{''.join(seen)}")


def ended_well(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    process.send_signal(signal.SIGTERM)
    process.stderr.read()
    assert process.wait(DEADLINE_S) == ExitCode.OK
    process.stderr.close()


def make_job(client: EtcdClient, keys: JobKeys, run: Path) -> None:
    run.mkdir()
    client.put(keys.record, encode(replace(make_record(), config={}, run_directory=str(run))))
    client.put(keys.host("host-1"), encode(make_host(1)))
    client.put(keys.round(2), encode(make_round()))


def announced_url(client: EtcdClient, keys: JobKeys) -> str:
    item = client.get(keys.dashboard)
    return "" if item is None else decode(DashboardRecord, item.value, "record").url


@pytest.mark.slow
def test_the_program_of_a_running_job(etcd: EtcdServers, tmp_path: Path) -> None:
    keys, run = JobKeys("demo"), tmp_path / "run"
    reached = ("--rdzv-endpoint", etcd.urls[0], "--port", "0")
    with EtcdClient(EtcdSettings.of(etcd.urls)) as client, ExitStack() as stack:
        make_job(client, keys, run)
        section = ("--section", encode(DashboardConfig()).decode())
        kept = started(
            "megatrain_dashboard", "--run", str(run), "--job", "demo", *reached, *section, directory=tmp_path
        )
        stack.callback(reaped, kept)
        url = line_with(kept, "dashboard of job demo at ").split()[-1]
        page = PageClient(int(url.rpartition(":")[2].strip("/")))
        wait_until(lambda: page.ask("/readyz").status == 200, "the first poll of etcd")
        assert page.ask("/api/v1/job").json["job"] == "demo"
        wait_until(lambda: announced_url(client, keys) == url, "the announcement")
        # A second server, started manually, does not replace it.
        other = started("megatrain", "dashboard", "demo", *reached, directory=tmp_path)
        stack.callback(reaped, other)
        line_with(other, "dashboard of job demo at ")
        ended_well(other)
        assert announced_url(client, keys) == url
        ended_well(kept)
        assert announced_url(client, keys) == ""


def reaped(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


@pytest.mark.slow
def test_the_program_of_a_recorded_run(tmp_path: Path) -> None:
    (tmp_path / "runs" / "old" / "events").mkdir(parents=True)
    process = started("megatrain", "dashboard", "--replay", "old", "--port", "0", directory=tmp_path)
    try:
        url = line_with(process, "dashboard of job old at ").split()[-1]
        page = PageClient(int(url.rpartition(":")[2].strip("/")))
        reported = page.ask("/api/v1/job").json
        expected = (True, False, True)
        assert (reported["is_recorded"], reported["can_act"], "recorded run" in reported["why_not_act"]) == expected
        ended_well(process)
    finally:
        process.kill()
        process.wait()


REFUSED = [
    (("--replay", "nowhere"), ExitCode.NOT_FOUND, "no such directory"),
    (("--replay", "old", "demo"), ExitCode.USAGE, "give only one of them"),
    (("--replay", "old", "--address", "0.0.0.0"), ExitCode.CONFIG, "can be reached from other machines"),
    (("--replay", "old", "--port", "77777"), ExitCode.USAGE, "from 0 to 65535"),
    (("--replay", "old", "--viewer-token-file", "nowhere"), ExitCode.CONFIG, "cannot be read"),
    (("nowhere",), ExitCode.NOT_FOUND, "no run directory of that name"),
]


def test_command_that_cannot_serve_ends_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatrain.cli import main

    (tmp_path / "runs" / "old").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for arguments, code, text in REFUSED:
            assert main(["dashboard", *arguments]) == code, arguments
            assert text in capsys.readouterr().err
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
