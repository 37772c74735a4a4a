"""The stream of changes to pages: to all of them, at most once a second, up to a limit on their number."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.api.live import HEARTBEAT, LiveStreams
from megatrain_dashboard.responses.errors import RefusalError
from megatrain_dashboard.settings import DashboardSettings, Limits
from megatrain_dashboard.sources.protocol import LiveState
from tests.helpers.dashboard_server import VIEWER_TOKEN, MadeUpJob, Served, bearer, head_of, read_head, served
from tests.helpers.waiting import DEADLINE_S, wait_until

QUICK = 0.01
USUAL = Limits()


@dataclass(frozen=True, slots=True)
class LiveEvent:
    id: str
    name: str
    data: dict[str, object]


def event_of(block: bytes) -> LiveEvent:
    fields = dict(line.split(": ", 1) for line in block.decode().strip().split("\n"))
    return LiveEvent(fields["id"], fields["event"], json.loads(fields["data"]))


async def next_event(events: AsyncIterator[bytes]) -> LiveEvent:
    async with asyncio.timeout(DEADLINE_S):
        async for block in events:
            if block.startswith(b"id: "):
                return event_of(block)
    raise AssertionError("the stream ended")


async def polled(source: MadeUpJob, num_times: int) -> None:
    """Wait until the source was read `num_times` more times."""
    wanted = source.num_reads + num_times
    what = f"{num_times} polls of the source"
    await asyncio.to_thread(wait_until, lambda: source.num_reads >= wanted, what)


def with_streams(run: Path, check: Callable[[LiveStreams, MadeUpJob], Awaitable[None]], limits: Limits = USUAL) -> None:
    source = MadeUpJob(RunDirectory(run))

    async def scenario() -> None:
        streams = LiveStreams(source, limits, "life-1", clock=lambda: 17.0, tick_s=QUICK)
        with streams.counted("10.0.0.1"):
            await check(streams, source)
        streams.close()

    asyncio.run(scenario())


def test_a_change_is_reported_once(tmp_path: Path) -> None:
    async def check(streams: LiveStreams, source: MadeUpJob) -> None:
        events = streams.events("")
        first = await next_event(events)
        assert (first.id, first.name) == ("life-1-1", "change")
        assert first.data == {"session": "life-1", "at_unix_s": 17.0, "step": None, "versions": {"overview": 1}}
        await polled(source, 3)  # nothing is sent while nothing changes
        source.state = LiveState(7, {"overview": 2, "heat": 1})
        second = await next_event(events)
        assert (second.id, second.data["step"]) == ("life-1-2", 7)
        assert second.data["versions"] == {"overview": 2, "heat": 1}

    with_streams(tmp_path, check)


def test_single_poll_serves_all_streams(tmp_path: Path) -> None:
    async def check(streams: LiveStreams, source: MadeUpJob) -> None:
        many = [streams.events("") for _ in range(50)]
        reported = await asyncio.gather(*map(next_event, many))
        assert {one.id for one in reported} == {"life-1-1"}
        assert source.num_reads < 10

    with_streams(tmp_path, check)


def test_a_client_that_reconnects_gets_the_missed_event(tmp_path: Path) -> None:
    async def check(streams: LiveStreams, source: MadeUpJob) -> None:
        await next_event(streams.events(""))
        # No change was missed: the next event is the next change.
        knowing = streams.events("life-1-1")
        assert (await anext(knowing)).startswith(b"retry: ")
        source.state = LiveState(3, {"overview": 2})
        assert (await next_event(knowing)).id == "life-1-2"
        for last_event_id in ("life-1-1", "life-0-2", "nonsense"):
            assert (await next_event(streams.events(last_event_id))).id == "life-1-2"

    with_streams(tmp_path, check)


def test_quiet_stream_stays_open_and_long_one_ends(tmp_path: Path) -> None:
    async def check(streams: LiveStreams, source: MadeUpJob) -> None:
        blocks = [block async for block in streams.events("")]
        assert blocks[0] == b"retry: 2000\n\n"
        assert blocks.count(HEARTBEAT) >= 2

    with_streams(tmp_path, check, Limits(heartbeat_s=0.02, stream_s=0.2))


def test_stream_that_is_not_read_delays_no_other(tmp_path: Path) -> None:
    """A stream that is not read gets the newest state when it is read, and nothing is queued for it meanwhile."""

    async def check(streams: LiveStreams, source: MadeUpJob) -> None:
        stalled, reading = streams.events(""), streams.events("")
        assert (await next_event(stalled)).id == "life-1-1"
        assert (await next_event(reading)).id == "life-1-1"
        for step in range(2, 6):
            source.state = LiveState(step, {"overview": step})
            assert (await next_event(reading)).data["step"] == step
        assert (await next_event(stalled)).id == "life-1-5"

    with_streams(tmp_path, check)


def test_error_of_the_source_ends_no_stream(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check(streams: LiveStreams, source: MadeUpJob) -> None:
        events = streams.events("")
        await next_event(events)
        source.problem = "no such segment"
        await polled(source, 1)
        source.problem, source.state = "", LiveState(9, {"overview": 2})
        assert (await next_event(events)).data["step"] == 9

    with_streams(tmp_path, check)
    assert "no such segment" in caplog.text


def test_the_number_of_streams_is_limited(tmp_path: Path) -> None:
    async def check(streams: LiveStreams, source: MadeUpJob) -> None:
        with ExitStack() as stack:
            stack.enter_context(streams.counted("10.0.0.1"))
            with pytest.raises(RefusalError, match=r"2 pages are open already at 10\.0\.0\.1"):
                streams.check_limits("10.0.0.1")
            stack.enter_context(streams.counted("10.0.0.2"))
            with pytest.raises(RefusalError, match="3 pages are open already; close one") as full:
                streams.check_limits("10.0.0.3")
            assert full.value.status == 503
            assert full.value.headers["Retry-After"] == "10"
        streams.check_limits("10.0.0.1")
        assert streams.num_open == 1
        streams.close()
        with pytest.raises(RefusalError, match="shutting down"):
            streams.check_limits("10.0.0.1")

    with_streams(tmp_path, check, Limits(max_streams=3, max_streams_per_address=2))


def opened(
    server: Served, address: str = "127.0.0.1", headers: Mapping[str, str] | None = None
) -> tuple[socket.socket, bytes]:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S, source_address=(address, 0))
    client.sendall(head_of("GET", "/api/v1/live", headers or {}, server.port))
    return client, read_head(client)


@pytest.mark.slow
def test_200_open_streams_do_not_block_requests(tmp_path: Path) -> None:
    with served(tmp_path, DashboardSettings(port=0)) as server, ExitStack() as stack:
        heads = []
        for number in range(200):
            client, head = opened(server, f"127.0.0.{2 + number % 4}")
            stack.enter_context(client)
            heads.append(head)
        assert sum(head.startswith(b"HTTP/1.1 200") for head in heads) == 100
        refused = next(head for head in heads if head.startswith(b"HTTP/1.1 503"))
        assert b"retry-after: 10" in refused.lower()
        server.ask("/api/v1/live").assert_refused(503, "100 pages are open already")
        assert server.ask("/api/v1/job").status == 200
        assert server.streams.num_open == 100
        stack.close()
        wait_until(lambda: server.streams.num_open == 0, "the streams' end")
        client, head = opened(server)
        client.close()
        assert head.startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_a_change_arrives_within_two_seconds(tmp_path: Path) -> None:
    with served(tmp_path, DashboardSettings(port=0)) as server, server.connected() as client:
        client.sendall(head_of("GET", "/api/v1/live", {}, server.port))
        head = read_head(client)
        headers = {line.partition(b": ")[0].lower(): line.partition(b": ")[2] for line in head.split(b"\r\n")}
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert headers[b"x-accel-buffering"] == b"no"
        assert headers[b"cache-control"] == b"no-store"
        assert b"content-security-policy" in headers
        received = head
        while b"event: change" not in received:
            received += client.recv(4096)
        server.source.state = LiveState(12, {"overview": 2})
        client.settimeout(DEADLINE_S)
        while b'"step":12' not in received:
            received += client.recv(4096)


def test_streams_need_a_token_and_are_limited(tmp_path: Path) -> None:
    assert (USUAL.max_streams, USUAL.max_streams_per_address) == (100, 60)
    settings = DashboardSettings(port=0, viewer_token=VIEWER_TOKEN, limits=Limits(max_streams_per_address=3))
    with served(tmp_path, settings) as server, ExitStack() as stack:
        server.ask("/api/v1/live").assert_refused(401)
        assert server.streams.num_open == 0
        server.ask("/api/v1/live?x=1", bearer(VIEWER_TOKEN)).assert_refused(400)
        for address in ("127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.2"):
            client, head = opened(server, address, bearer(VIEWER_TOKEN))
            stack.enter_context(client)
            assert head.startswith(b"HTTP/1.1 200"), address
        refused = server.ask("/api/v1/live", bearer(VIEWER_TOKEN))
        refused.assert_refused(503, "3 pages are open already at 127.0.0.1")
