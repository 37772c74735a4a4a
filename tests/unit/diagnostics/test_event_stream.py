"""Rows from a sender to the store through a real server: once and in order, despite restarts and full disks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from megatrain.contracts.records.record import encode
from megatrain_diagnostics.collector import event_server
from megatrain_diagnostics.collector.counters import RejectionReason
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.tables import Clocks, LogLines, Spans, Table, num_rows
from megatrain_diagnostics.store.segments import StoreError
from megatrain_diagnostics.wire.authentication import SenderName, authenticate_to_daemon
from megatrain_diagnostics.wire.connection import DaemonConnection
from megatrain_diagnostics.wire.frames import FrameKind, FrameSocket, WireError
from megatrain_diagnostics.wire.messages import MAX_FRAME_BYTES, MAX_FRAME_ROWS, BatchHeader, batch_bytes
from megatrain_diagnostics.wire.sender import Sender, SenderLimits
from tests.helpers.event_collector import RunningCollector, span_rows
from tests.helpers.fixed_daemon import FixedDaemon
from tests.helpers.table_rows import table_rows
from tests.helpers.waiting import DEADLINE_S, wait_until


@pytest.fixture(autouse=True)
def prompt_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server check often whether it is being stopped."""
    monkeypatch.setattr(event_server, "_ACCEPT_S", 0.02)


class HeldStore:
    """Keeps rows in memory, and fails to commit while `is_full` is set."""

    def __init__(self) -> None:
        self.appended: list[tuple[type[Table], pa.RecordBatch]] = []
        self.is_full = False
        self.may_commit = threading.Event()
        self.may_commit.set()

    def append(self, kind: type[Table], batch: pa.RecordBatch) -> None:
        self.appended.append((kind, batch))

    def commit(self) -> None:
        self.may_commit.wait(DEADLINE_S)
        if self.is_full:
            raise StoreError("events: No space left on device")

    def sequences(self) -> list[int]:
        return [number for kind, batch in self.appended if kind is Spans for number in batch["sequence"].to_pylist()]


@contextmanager
def stranger(collector: RunningCollector) -> Iterator[FrameSocket]:
    """Connect without a token."""
    connection = FrameSocket(socket.create_connection(("127.0.0.1", collector.server.port)))
    connection.limit_silence(receive_s=DEADLINE_S, send_s=DEADLINE_S)
    yield connection
    connection.close()


def test_acknowledged_rows_are_on_disk_once(tmp_path: Path) -> None:
    columns = {"rank": [0, 1], "at_ns": time.time_ns(), "host": "host-1", "line": ["step 1", "gr\u00fc\u00dfe \udcff"]}
    lines = table_rows(LogLines, columns)
    with RunningCollector(tmp_path / "events") as collector:
        with Sender("host-1", FixedDaemon(collector.record), tmp_path / "spool") as sender:
            for first in range(0, 500, 100):
                sender.send(Spans, span_rows(100, first=first))
            sender.send(LogLines, lines)
            assert sender.flush(DEADLINE_S)
            spans = collector.read(Spans)  # while the writer writes
        assert spans.sequence.tolist() == list(range(500))
        assert collector.read(LogLines).line.tolist() == ["step 1", "gr\u00fc\u00dfe ?"]
        clocks = collector.read(Clocks)
        assert clocks.host.tolist() == ["host-1"]
        assert abs(int(clocks.offset_ns[0])) <= int(clocks.error_ns[0])  # one machine, one clock
        counters = collector.statistics.counters()
        assert counters.stored_rows == {"spans": 500, "logs": 2, "clocks": 1}
        assert (counters.refused_rows, counters.refused_batches, counters.duplicate_batches) == ({}, {}, 0)


def test_clock_offset_of_the_daemon_is_measured(tmp_path: Path) -> None:
    hour_ns = 3_600 * 10**9
    with RunningCollector(tmp_path / "events", clock_ahead_ns=hour_ns) as collector:
        with Sender("host-1", FixedDaemon(collector.record), None) as sender:
            wait_until(lambda: sender.state().outbox.acknowledged_rows > 0, "the clocks")
        clocks = collector.read(Clocks)
    assert abs(int(clocks.offset_ns[0]) + hour_ns) <= int(clocks.error_ns[0]) < 10**9


def test_a_large_table_is_cut_into_batches(tmp_path: Path) -> None:
    limits = SenderLimits(memory_bytes=64 << 20)  # there is no spool
    with RunningCollector(tmp_path / "events") as collector:
        with Sender("host-1", FixedDaemon(collector.record), None, limits) as sender:
            sender.send(Spans, span_rows(150_000))
            assert sender.flush(DEADLINE_S)
        assert collector.statistics.counters().batches >= 3 + 1  # and one of the clocks
        assert num_rows(collector.read(Spans)) == 150_000


def test_rows_without_a_daemon_are_spooled_and_replayed(tmp_path: Path) -> None:
    finder = FixedDaemon(None)
    limits = SenderLimits(memory_bytes=25_000)  # eight times this holds all rows, however slow the disk is
    with Sender("host-1", finder, tmp_path / "spool", limits) as sender:
        for first in range(0, 2000, 100):
            sender.send(Spans, span_rows(100, first=first))
        wait_until(lambda: len(list((tmp_path / "spool").iterdir())) >= 18, "the spool")
        assert sender.state().outbox.memory_bytes <= 25_000
        assert "no daemon" in sender.state().problem
        with RunningCollector(tmp_path / "events") as collector:
            finder.replace(collector.record)
            assert sender.flush(DEADLINE_S)
            assert sender.state().is_connected
            assert collector.read(Spans).sequence.tolist() == list(range(2000))
        assert list((tmp_path / "spool").iterdir()) == []
        assert sender.state().outbox.dropped_rows == 0


def test_rows_of_an_ended_sender_are_sent_by_the_next(tmp_path: Path) -> None:
    with Sender("host-1", FixedDaemon(None), tmp_path / "spool") as sender:
        sender.send(Spans, span_rows(100))
        assert not sender.close(flush_s=0.0)
    with RunningCollector(tmp_path / "events") as collector:
        with Sender("host-1", FixedDaemon(collector.record), tmp_path / "spool") as sender:
            sender.send(Spans, span_rows(100, first=100))
            assert sender.flush(DEADLINE_S)
        assert collector.read(Spans).sequence.tolist() == list(range(200))


def test_daemon_restarts_lose_and_repeat_no_row(tmp_path: Path) -> None:
    finder = FixedDaemon(None)
    with Sender("host-1", finder, tmp_path / "spool") as sender:
        for life in range(2):
            with RunningCollector(tmp_path / "events", session=f"life-{life}") as collector:
                finder.replace(collector.record)
                for first in range(1000 * life, 1000 * life + 800, 100):
                    sender.send(Spans, span_rows(100, first=first))
                wait_until(lambda: collector.statistics.counters().stored_rows.get("spans", 0) > 0, "rows")
            for first in range(1000 * life + 800, 1000 * life + 1000, 100):  # while no daemon runs
                sender.send(Spans, span_rows(100, first=first))
        with RunningCollector(tmp_path / "events", session="last") as collector:
            finder.replace(collector.record)
            assert sender.flush(DEADLINE_S)
            assert collector.read(Spans).sequence.tolist() == list(range(2000))


def test_repeated_batches_are_recognized_by_number(tmp_path: Path) -> None:
    store = HeldStore()
    with RunningCollector(tmp_path / "events", store=store) as collector:
        record, name = collector.record, SenderName("host-1", "one life")
        acknowledged: list[int] = []
        store.may_commit.clear()

        def send(numbers: list[int]) -> DaemonConnection:
            connection = DaemonConnection(
                record, name, lambda answer: acknowledged.append(answer.through), lambda: None
            )
            for number in numbers:
                header = BatchHeader("spans", number, time.time_ns())
                connection.send(header, batch_bytes(span_rows(1, first=number)))
            return connection

        first = send([0, 1, 2])
        wait_until(lambda: collector.statistics.counters().batches == 3, "three batches")
        first.cancel()
        second = send([0, 1, 2, 3])
        wait_until(lambda: collector.statistics.counters().batches == 4, "the fourth batch")
        assert set(acknowledged) <= {-1}
        store.may_commit.set()
        wait_until(lambda: 3 in acknowledged, "the acknowledgment")
        second.finish()
        second.wait(DEADLINE_S)
        second.cancel()
        assert store.sequences() == [0, 1, 2, 3]
        assert collector.statistics.counters().duplicate_batches == 3


def test_senders_longest_without_a_stream_are_forgotten(tmp_path: Path) -> None:
    with RunningCollector(tmp_path / "events", store=HeldStore()) as collector:
        session = collector.ingest.session
        names = [SenderName("host-1", f"life {number}") for number in range(20_000)]
        first, second, *_ = [session(name) for name in names]
        assert session(names[0]) is first
        session(SenderName("host-2", "one life"))
        assert session(names[0]) is first
        assert session(names[1]) is not second


@pytest.mark.slow
def test_acknowledgment_waits_for_disk_space(tmp_path: Path) -> None:
    store = HeldStore()
    store.is_full = True
    with RunningCollector(tmp_path / "events", store=store) as collector:
        with Sender("host-1", FixedDaemon(collector.record), tmp_path / "spool") as sender:
            sender.send(Spans, span_rows(100))
            wait_until(lambda: collector.statistics.counters().failed_commits > 0, "a commit that failed")
            assert sender.state().outbox.acknowledged_rows == 0
            assert "No space left" in collector.ingest.problem
            store.is_full = False
            assert sender.flush(DEADLINE_S)
            assert collector.ingest.problem == ""
        assert store.sequences() == list(range(100))


def test_a_slow_disk_holds_streams_back_and_bounds_the_memory(tmp_path: Path) -> None:
    store = HeldStore()
    store.may_commit.clear()
    limits = SenderLimits(memory_bytes=1 << 20, window_bytes=64 << 20)
    with RunningCollector(tmp_path / "events", store=store) as collector:
        collector.ingest._limits = replace(collector.ingest._limits, pending_bytes=1 << 20)
        with Sender("host-1", FixedDaemon(collector.record), tmp_path / "spool", limits) as sender:
            for first in range(0, 100_000, 10_000):
                sender.send(Spans, span_rows(10_000, first=first))
            wait_until(lambda: collector.statistics.counters().batches >= 2, "batches")
            held = collector.statistics.counters().num_bytes
            assert held < 3 << 20  # of seven that were sent
            store.may_commit.set()
            assert sender.flush(DEADLINE_S)
        assert store.sequences() == list(range(100_000))


def test_sender_stays_idle_without_a_daemon(tmp_path: Path) -> None:
    store = HeldStore()
    store.may_commit.clear()
    with RunningCollector(tmp_path / "events", store=store) as collector:
        sender = Sender("host-1", FixedDaemon(collector.record), None, SenderLimits(memory_bytes=1 << 20))
        # the daemon acknowledges no batch before the end of this loop: a call that waited would not return
        for first in range(0, 400_000, 4000):
            sender.send(Spans, span_rows(4000, first=first))
        state = sender.state().outbox
        assert state.dropped_rows > 0
        assert state.dropped_rows + 4000 * state.num_batches >= 400_000 - 4000
        store.may_commit.set()
        sender.close()
        wait_until(lambda: collector.statistics.counters().connected == (), "the end of the stream")
        # the next batch reports the dropped rows to the daemon
        assert collector.statistics.counters().dropped_rows["host-1"] > 0


def test_wrong_token_is_refused_and_never_sent(tmp_path: Path) -> None:
    with RunningCollector(tmp_path / "events") as collector:
        record = replace(collector.record, token="another token")
        with Sender("host-1", FixedDaemon(record), None) as sender:
            wait_until(lambda: "does not have the token" in sender.state().problem, "the refusal")
            assert not sender.state().is_connected
        name = SenderName("host-1", "s")
        with pytest.raises(WireError, match="does not have the token"):
            DaemonConnection(record, name, lambda answer: None, lambda: None)
        assert collector.statistics.counters().refused_handshakes >= 1
        assert num_rows(collector.read(Spans)) == 0


def refusal(connection: FrameSocket) -> str:
    """Return the reason with which the daemon ends a connection, or "" if it answers."""
    try:
        connection.receive()
    except WireError as error:
        return str(error)
    return ""


def test_garbage_in_a_handshake_is_refused(tmp_path: Path) -> None:
    greetings = (b"", b"{}", b"[" * 4000, b'{"schema_version":1,"host":1}', bytes(range(256)))
    proofs = (b"0" * 64, b"\xc3\xa9", b"")
    with RunningCollector(tmp_path / "events") as collector:
        for greeting in greetings:
            with stranger(collector) as host:
                host.send(FrameKind.HANDSHAKE, greeting)
                assert "a host's greeting: " in refusal(host), greeting
        for proof in proofs:
            with stranger(collector) as host:  # it does not check whether the daemon has the token
                host.send(FrameKind.HANDSHAKE, b'{"schema_version":1,"host":"host-1","session":"s","nonce":"00"}')
                host.receive()
                host.send(FrameKind.HANDSHAKE, b'{"schema_version":1,"proof":"%b"}' % proof)
                assert "host 'host-1' has another token than this daemon" in refusal(host), proof
        assert collector.statistics.counters().refused_handshakes == len(greetings) + len(proofs)
        assert num_rows(collector.read(Spans)) == 0


def test_rows_before_admission_are_not_read(tmp_path: Path) -> None:
    with RunningCollector(tmp_path / "events") as collector:
        for kind in (FrameKind.BATCH, FrameKind.CLOCK, FrameKind.END, FrameKind.ACKNOWLEDGMENT):
            with stranger(collector) as unknown:
                unknown.send(kind, encode(BatchHeader("spans", 1, time.time_ns())))
                assert f"expected a host's greeting, received {kind.name}" in refusal(unknown)
        assert collector.statistics.counters().batches == 0


def compressed(rows: Table) -> pa.Buffer:
    """Return a batch whose buffers are compressed: two megabytes of zeros take a few hundred bytes."""
    sink = pa.BufferOutputStream()
    batch = to_arrow(rows)
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def garbage_frames() -> list[tuple[bytes, pa.Buffer]]:
    """Return invalid messages of all kinds; none of them may end a stream."""
    now = time.time_ns()
    good = batch_bytes(span_rows(5))
    cut = pa.py_buffer(good.to_pybytes()[: good.size // 2])
    changed = bytearray(good.to_pybytes())
    changed[40:200] = bytes(range(160))
    other = pa.BufferOutputStream()
    schema = pa.schema([("rank", pa.string())])
    with pa.ipc.new_stream(other, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array(["one"])], schema=schema))
    text = table_rows(LogLines, {"at_ns": now, "host": "host-1", "line": "x" * 99})
    offsets = bytearray(batch_bytes(text).to_pybytes())
    place = bytes(offsets).rindex(b"x" * 99)
    offsets[place - 64 : place] = b"\xff" * 64  # the offsets of the text of the line
    return [
        (b"no json", good),
        (b'{"schema_version":1}', good),
        (encode(BatchHeader("spans", -5, now)), good),
        (encode(BatchHeader("nonsense", 1, now)), good),
        (encode(BatchHeader("spans", 2, now)), cut),
        (encode(BatchHeader("spans", 3, now)), pa.py_buffer(bytes(changed))),
        (encode(BatchHeader("spans", 4, now)), other.getvalue()),
        (encode(BatchHeader("totals", 5, now)), good),
        (encode(BatchHeader("logs", 6, now)), pa.py_buffer(bytes(offsets))),
        (encode(BatchHeader("spans", 7, now)), pa.py_buffer(b"x")),
        (encode(BatchHeader("spans", 8, now)), pa.py_buffer(b"")),
        (encode(BatchHeader("spans", 9, now)), compressed(span_rows(30_000))),
        (encode(BatchHeader("spans", 10, now)), batch_bytes(span_rows(MAX_FRAME_ROWS + 1))),
        (encode(BatchHeader("spans", 11, now)), pa.py_buffer(bytes(MAX_FRAME_BYTES + 1))),
    ]


def test_garbage_rows_are_counted_and_the_stream_continues(tmp_path: Path) -> None:
    frames = garbage_frames()
    with RunningCollector(tmp_path / "events") as collector:
        with stranger(collector) as host:
            authenticate_to_daemon(host, SenderName("host-1", "s"), collector.record.token)
            for header, content in frames:
                host.send(FrameKind.BATCH, header, content)
            host.send(FrameKind.BATCH, encode(BatchHeader("spans", 100, time.time_ns())), batch_bytes(span_rows(5)))
            host.send(FrameKind.END)
            answers = []
            while (frame := host.receive()) is not None:
                answers.append(frame.header)
        assert b'"through":100' in answers[-1]
        counters = collector.statistics.counters()
        assert counters.refused_batches == {
            (RejectionReason.BAD_HEADER, "host-1"): 3,
            (RejectionReason.UNKNOWN_TABLE, "host-1"): 1,
            (RejectionReason.NO_BATCH, "host-1"): 10,
        }
        assert collector.read(Spans).sequence.tolist() == [0, 1, 2, 3, 4]


def test_malformed_frame_ends_the_stream_with_a_reason(tmp_path: Path) -> None:
    batch = batch_bytes(span_rows(5))
    with RunningCollector(tmp_path / "events") as collector:
        with stranger(collector) as host:
            authenticate_to_daemon(host, SenderName("host-1", "s"), collector.record.token)
            host.send(FrameKind.BATCH, encode(BatchHeader("spans", 1, time.time_ns())), batch)
            host._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            with pytest.raises(WireError, match="not a frame: kind 80, a header of "):
                while host.receive() is not None:
                    pass
        wait_until(lambda: collector.statistics.counters().connected == (), "the end of the stream")
        wait_until(lambda: num_rows(collector.read(Spans)) == 5, "the rows")


class Watcher:
    """Keeps the tables that it gets, except the first: it fails on that."""

    def __init__(self) -> None:
        self.tables: list[Table] = []
        self.num_ticks = self.num_calls = 0

    def consume(self, table: Table) -> None:
        self.num_calls += 1
        if self.num_calls == 1:
            raise RuntimeError("a judge that fails")
        self.tables.append(table)

    def tick(self, now_s: float) -> None:
        self.num_ticks += 1


def test_consumers_get_committed_rows_and_may_fail(tmp_path: Path) -> None:
    watcher = Watcher()
    with RunningCollector(tmp_path / "events", consumers=(watcher,)) as collector:
        collector.rounds.add(3, world_size=8)
        with Sender("host-1", FixedDaemon(collector.record), None) as sender:
            wait_until(lambda: watcher.num_calls > 0, "the first table, of clocks")
            sender.send(Spans, span_rows(5, round_number=3))
            sender.send(Spans, span_rows(7, round_number=2))
            assert sender.flush(DEADLINE_S)
            wait_until(lambda: len(watcher.tables) >= 1 and watcher.num_ticks > 1, "tables and ticks")
        assert num_rows(collector.read(Spans)) == 12
        assert collector.statistics.counters().old_rows == 7
    assert [(num_rows(table), table.round[0]) for table in watcher.tables] == [(5, 3)]
