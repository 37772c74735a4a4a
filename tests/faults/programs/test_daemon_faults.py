"""The diagnostics daemon under faults: hosts that keep connections open, and an etcd outage."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.record import encode
from megatrain_diagnostics.events.tables import Spans
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.wire.discovery import WatchedDaemon
from megatrain_diagnostics.wire.sender import Sender
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from tests.helpers.daemon_process import KEYS, daemon_record, running_daemon
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.event_collector import span_rows
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S, wait_until


@pytest.mark.slow
def test_a_stream_that_does_not_end_keeps_no_daemon_alive(tmp_path: Path) -> None:
    with (
        EtcdServers(tmp_path) as etcd,
        EtcdClient(EtcdSettings.of(etcd.urls)) as client,
        running_daemon(tmp_path / "run", etcd.urls) as daemon,
    ):
        wait_until(lambda: daemon_record(client) is not None, "the record")
        stubborn = ROOT / "tests" / "helpers" / "stubborn_stream.py"
        record = encode(daemon_record(client)).decode()
        with subprocess.Popen([sys.executable, str(stubborn), record], stdout=subprocess.PIPE) as host:
            try:
                assert host.stdout is not None
                assert host.stdout.readline() == b"streaming\n"
                assert daemon.end() == ExitCode.OK
            finally:
                host.kill()


@pytest.mark.slow
def test_daemon_without_etcd_publishes_itself_afterwards(tmp_path: Path) -> None:
    with EtcdServers(tmp_path) as etcd, EtcdClient(EtcdSettings.of(etcd.urls)) as client:
        etcd.members[0].kill()
        with running_daemon(tmp_path / "run", etcd.urls) as daemon:
            wait_until(lambda: "cannot be announced" in daemon.log, "the complaint")
            etcd.members[0].start()
            etcd.wait_ready()
            wait_until(lambda: daemon_record(client) is not None, "the record")
            finder = WatchedDaemon(client, KEYS)
            with Sender("host-1", finder, None) as sender:
                wait_until(lambda: sender.state().is_connected, "the stream")
                etcd.members[0].kill()
                sender.send(Spans, span_rows(10))
                assert sender.flush(DEADLINE_S)
            finder.close()
            assert daemon.end() == ExitCode.OK
    assert len(StoredEvents(tmp_path / "run" / "events").read(Spans).sequence) == 10


@pytest.mark.slow
def test_batches_of_a_frozen_daemon_go_to_the_next(tmp_path: Path) -> None:
    with EtcdServers(tmp_path) as etcd, EtcdClient(EtcdSettings.of(etcd.urls)) as client:
        finder = WatchedDaemon(client, KEYS)
        with Sender("host-1", finder, tmp_path / "spool") as sender:
            with running_daemon(tmp_path / "run", etcd.urls) as frozen:
                wait_until(lambda: sender.state().is_connected, "the stream")
                frozen.process.send_signal(signal.SIGSTOP)
                sender.send(Spans, span_rows(10))
                wait_until(lambda: not sender.state().is_connected, "the end of the time limit")
            with running_daemon(tmp_path / "run", etcd.urls):
                assert sender.flush(DEADLINE_S)
        finder.close()
    assert StoredEvents(tmp_path / "run" / "events").read(Spans).sequence.tolist() == list(range(10))


@pytest.mark.slow
def test_daemon_killed_repeatedly_loses_no_acknowledged_batch(tmp_path: Path) -> None:
    num_sent = 0
    run = tmp_path / "run"
    with EtcdServers(tmp_path) as etcd, EtcdClient(EtcdSettings.of(etcd.urls)) as client:
        finder = WatchedDaemon(client, KEYS)
        with Sender("host-1", finder, tmp_path / "spool") as sender:
            for life in range(3):
                with running_daemon(run, etcd.urls) as daemon:
                    goal = sender.state().outbox.acknowledged_rows + 1000 * (life + 1)
                    while sender.state().outbox.acknowledged_rows < goal:
                        sender.send(Spans, span_rows(1000, first=num_sent))
                        num_sent += 1000
                        wait_until(lambda: sender.state().outbox.num_batches < 20, "acknowledgments")
                    daemon.kill()
                stored = StoredEvents(run / "events")
                assert len(stored.read(Spans).sequence) >= goal - 2 * (life + 1)  # rows of clocks are counted too
                assert stored.problems() == ()
            with running_daemon(run, etcd.urls):
                assert sender.flush(DEADLINE_S)
        finder.close()
    assert StoredEvents(run / "events").read(Spans).sequence.tolist() == list(range(num_sent))
