"""Connections without the token take no memory of the daemon and keep no host out; the process is measured."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pyarrow.flight as flight
import pytest

from megatrain.contracts.records.diag_records import DaemonRecord
from megatrain.contracts.records.record import decode
from megatrain_diagnostics.collector import event_server
from megatrain_diagnostics.events.tables import Spans
from megatrain_diagnostics.wire.authentication import SenderName, authenticate_to_daemon
from megatrain_diagnostics.wire.frames import FrameKind, FrameSocket, WireError
from megatrain_diagnostics.wire.sender import Sender
from tests.helpers.event_collector import RunningCollector, span_rows
from tests.helpers.fixed_daemon import FixedDaemon
from tests.helpers.slow_peer import is_ended_when_sent
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S, wait_until

GREETING_BYTES = 400 << 20
MOST_GROWTH_BYTES = 64 << 20
SERVE = """
import sys, threading
from pathlib import Path
from megatrain.contracts.records.record import encode
from tests.helpers.event_collector import RunningCollector
with RunningCollector(Path(sys.argv[1])) as collector:
    print(encode(collector.record).decode(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def prompt_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server check often whether it is being stopped."""
    monkeypatch.setattr(event_server, "_ACCEPT_S", 0.02)


@contextmanager
def served(events: Path) -> Iterator[tuple[subprocess.Popen[str], DaemonRecord]]:
    """Run a collector in a separate process."""
    command = [sys.executable, "-c", SERVE, str(events)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield process, decode(DaemonRecord, process.stdout.readline(), "record")
        finally:
            process.kill()


def peak_bytes(pid: int) -> int:
    """Return the peak memory of a process."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


class _LongGreeting(flight.ClientAuthHandler):
    def authenticate(self, outgoing, incoming) -> None:
        outgoing.write(bytes(GREETING_BYTES))
        incoming.read()

    def get_token(self) -> bytes:
        return b""


def greet_by_flight(record: DaemonRecord) -> None:
    client = flight.FlightClient(f"grpc://{record.address}:{record.port}")
    with pytest.raises(flight.FlightError):
        client.authenticate(_LongGreeting(), flight.FlightCallOptions(timeout=DEADLINE_S))
    client.close()


def greet_by_frame(record: DaemonRecord) -> None:
    """Announce a header of 400 MiB, and send it."""
    start = struct.pack("<BQQ", FrameKind.HANDSHAKE, GREETING_BYTES, 0)
    with socket.create_connection((record.address, record.port)) as connection, suppress(ConnectionError):
        connection.sendall(start)
        for _ in range(GREETING_BYTES >> 20):
            connection.sendall(bytes(1 << 20))


def greet_by_content(record: DaemonRecord) -> None:
    """Announce content, which only an admitted host may send, and send it."""
    start = struct.pack("<BQQ", FrameKind.BATCH, 2, GREETING_BYTES)
    with socket.create_connection((record.address, record.port)) as connection, suppress(ConnectionError):
        connection.sendall(start + b"{}")
        for _ in range(GREETING_BYTES >> 20):
            connection.sendall(bytes(1 << 20))


@pytest.mark.slow
@pytest.mark.parametrize("greet", [greet_by_flight, greet_by_frame, greet_by_content])
def test_a_greeting_of_400_mib_takes_no_memory(tmp_path: Path, greet: Callable[[DaemonRecord], None]) -> None:
    with served(tmp_path / "events") as (process, record):
        before = peak_bytes(process.pid)
        greet(record)
        with Sender("host-1", FixedDaemon(record), None) as sender:
            sender.send(Spans, span_rows(10))
            assert sender.flush(DEADLINE_S), "the daemon continues to serve"
        assert peak_bytes(process.pid) - before < MOST_GROWTH_BYTES


@pytest.mark.slow
def test_silent_connections_do_not_block_a_host(tmp_path: Path) -> None:
    """Ten times as many strangers as allowed connect; each new one disconnects the oldest."""
    with RunningCollector(tmp_path / "events") as collector, ExitStack() as opened:
        address = ("127.0.0.1", collector.server.port)
        silent = [opened.enter_context(socket.create_connection(address)) for _ in range(10 * 128)]
        with Sender("host-1", FixedDaemon(collector.record), None) as sender:
            sender.send(Spans, span_rows(10))
            assert sender.flush(DEADLINE_S)
        silent[0].settimeout(DEADLINE_S)
        with suppress(ConnectionError):
            while silent[0].recv(1000):
                pass  # it gets the reason and is disconnected
        wait_until(lambda: len(collector.server._strangers) <= event_server.MAX_STRANGERS, "the oldest to go")
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("event stream") <= event_server.MAX_STRANGERS + 20


def test_slow_handshake_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_server, "HANDSHAKE_S", 0.2)
    with RunningCollector(tmp_path / "events") as collector:
        with socket.create_connection(("127.0.0.1", collector.server.port)) as slow:
            slow.sendall(struct.pack("<BQQ", FrameKind.HANDSHAKE, 4096, 0))
            # a byte at a time, so that no receive of the daemon waits long
            wait_until(lambda: is_ended_when_sent(slow, b" "), "the daemon to end the handshake")
        wait_until(lambda: collector.statistics.counters().refused_handshakes > 0, "the count")
        assert collector.statistics.counters().refused_handshakes == 1


@pytest.mark.slow
def test_admitted_host_is_read_within_the_limit(tmp_path: Path) -> None:
    """A host with the right token sends a frame of 400 MiB: the daemon does not hold it in memory."""
    with served(tmp_path / "events") as (process, record):
        connection = FrameSocket(socket.create_connection((record.address, record.port)))
        authenticate_to_daemon(connection, SenderName("host-1", "s"), record.token)
        before = peak_bytes(process.pid)
        connection._socket.sendall(struct.pack("<BQQ", FrameKind.BATCH, 2, GREETING_BYTES) + b"{}")
        for _ in range(GREETING_BYTES >> 20):
            connection._socket.sendall(bytes(1 << 20))
        connection.send(FrameKind.END)
        connection.limit_silence(receive_s=DEADLINE_S)
        with suppress(WireError):
            while connection.receive() is not None:
                pass
        connection.close()
        assert peak_bytes(process.pid) - before < MOST_GROWTH_BYTES
        assert process.poll() is None
