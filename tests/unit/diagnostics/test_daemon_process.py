"""The daemon with a real etcd: found by its record, killed at any moment, and its errors where it cannot serve."""

from __future__ import annotations

import shutil
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from types import CodeType

import pytest

from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.config.load import load_config
from megatrain.config.serialize import config_values
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.layout import Layout
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import JobRecord, Round
from megatrain.run_files.run_directory import RunDirectory
from megatrain_diagnostics import daemon
from megatrain_diagnostics.collector import event_server
from megatrain_diagnostics.collector.configuration import Configuration
from megatrain_diagnostics.collector.settings import DaemonSettings
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.daemon import run_daemon
from megatrain_diagnostics.events.tables import Ranks, Spans
from megatrain_diagnostics.store.daemon_state import read_state
from megatrain_diagnostics.store.event_store import EventStore
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.retention import Retention
from megatrain_diagnostics.store.segment_store import SegmentStore
from megatrain_diagnostics.store.segments import StoreError
from megatrain_diagnostics.wire.discovery import WatchedDaemon
from megatrain_diagnostics.wire.sender import Sender
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from tests.helpers.daemon_process import KEYS, daemon_record, running_daemon
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.event_collector import span_rows
from tests.helpers.ports import free_ports
from tests.helpers.synthetic_steps import SyntheticJob
from tests.helpers.waiting import DEADLINE_S, wait_until

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(autouse=True)
def prompt_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server check often whether it is being stopped."""
    monkeypatch.setattr(event_server, "_ACCEPT_S", 0.02)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    with EtcdServers(tmp_path_factory.mktemp("etcd")) as servers:
        yield servers


@pytest.mark.slow
def test_killed_daemon_keeps_acknowledged_batches(etcd: EtcdServers, client: EtcdClient, tmp_path: Path) -> None:
    run, num_sent = tmp_path / "run", 0
    client.put(KEYS.round(3), encode(Round(3, 4, (), "127.0.0.1", 1, "a test", "driver", 1.0)))
    client.put(KEYS.round(4), "no round")
    finder = WatchedDaemon(client, KEYS)
    with Sender("host-1", finder, tmp_path / "spool") as sender:
        with running_daemon(run, etcd.urls) as first:

            def has_acknowledged() -> bool:
                nonlocal num_sent
                sender.send(Spans, span_rows(100, first=num_sent, round_number=3, rank=3))
                num_sent += 100
                return sender.state().outbox.acknowledged_rows >= 2000

            wait_until(has_acknowledged, "acknowledgments")
            first.kill()
            acknowledged = sender.state().outbox.acknowledged_rows - 1  # a row of clocks
        stored = StoredEvents(run / "events")
        assert len(stored.read(Spans).sequence) >= acknowledged
        assert stored.problems() == ()
        with running_daemon(run, etcd.urls) as second:
            sender.send(Spans, span_rows(3, rank=4, round_number=3))
            assert sender.flush(DEADLINE_S)
            wait_until(lambda: "3 rows rejected: out-of-range" in second.log, "the complaint")
            assert "skipped" in second.log  # the record of round 4, which is invalid
            wait_until(lambda: written_state(run) == ({"out-of-range": 3}, ("host-1",)), "the state that it reports")
            record = daemon_record(client)
            assert record is not None
            assert second.end() == ExitCode.OK
            assert daemon_record(client) is None
            assert record.token not in second.log
            wait_until(lambda: not sender.state().is_connected, "the end of the stream")
    finder.close()
    assert StoredEvents(run / "events").read(Spans).sequence.tolist() == list(range(num_sent))
    assert sender.state().outbox.dropped_rows == 0


def written_state(run: Path) -> tuple[object, object]:
    """Return the refused rows and the connected hosts in the state of the running daemon."""
    state, _ = read_state(run / "diagnosis")
    return (None, None) if state is None else (dict(state.refused_rows), state.connected_hosts)


def settings_of(etcd: EtcdServers, run: Path, address: str = "127.0.0.1", port: int = 0) -> DaemonSettings:
    """Return the settings of a daemon that is not started by a launch."""
    return DaemonSettings(run=run, job="other", etcd=EtcdSettings.of(etcd.urls), address=address, port=port)


def launched_settings(etcd: EtcdServers, run: Path, address: str = "127.0.0.1", port: int = 0) -> DaemonSettings:
    return replace(settings_of(etcd, run, address, port), section=DiagnosticsConfig())


@pytest.mark.slow
@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid"])
def test_foreign_listening_address_is_refused(etcd: EtcdServers, tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match=f"diagnostics.daemon_address='{address}', daemon_port=0: cannot listen"):
        run_daemon(launched_settings(etcd, tmp_path, address), threading.Event())


@pytest.mark.slow
def test_port_in_use_is_refused(etcd: EtcdServers, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"daemon_port={port}: cannot listen there: .*in use"):
            run_daemon(launched_settings(etcd, tmp_path, port=port), threading.Event())


def test_second_daemon_of_a_run_is_refused_with_a_message(
    etcd: EtcdServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "_LOCK_PATIENCE_S", 0.0)
    with (
        EventStore(tmp_path / "events"),
        pytest.raises(StoreError, match="writes events there; a job has a single daemon"),
    ):
        run_daemon(settings_of(etcd, tmp_path), threading.Event())


def test_removal_waits_for_the_retention_settings(tmp_path: Path) -> None:
    settings = DaemonSettings(run=tmp_path, job="demo", etcd=EtcdSettings.of(["http://127.0.0.1:1"]))
    configuration = Configuration(settings)
    assert configuration.retention.hours >= 1e6
    assert configuration.retention.num_bytes >= 1e18
    record = JobRecord("demo", "", "", {"diagnostics.retention_hours": "]"}, 1, 1, 1, "", "", 1.0)
    configuration.take(record)
    assert configuration.retention.hours >= 1e6
    config = load_config(
        CONFIGS / "demo.toml",
        ["--diagnostics.retention_hours=2.5", "--diagnostics.retention_gb=3", "--checkpoint.directory=/elsewhere"],
    ).config
    configuration.take(replace(record, config=config_values(config)))
    assert configuration.retention == Retention(2.5, 3e9)
    assert configuration.checkpoints == Path("/elsewhere")
    configuration.take(replace(record, config={}))  # a job that torchrun started
    assert configuration.section == DiagnosticsConfig()
    assert configuration.retention.hours == DiagnosticsConfig().retention_hours
    launched = Configuration(replace(settings, section=config.diagnostics))
    assert launched.retention == Retention(2.5, 3e9)
    assert launched.checkpoints == tmp_path / "checkpoints"


def is_in(thread: threading.Thread, code: CodeType) -> bool:
    """Return whether a thread is executing a function now."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and any(one.f_code is code for one, _ in traceback.walk_stack(frame))


@contextmanager
def daemon_thread(settings: DaemonSettings) -> Iterator[threading.Thread]:
    stop = threading.Event()
    thread = threading.Thread(target=run_daemon, args=(settings, stop))
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join()


def answer_of(port: int) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.slow(kept=["False"])
@pytest.mark.parametrize("is_launched", [True, False])
def test_daemon_listens_only_as_configured(
    etcd: EtcdServers, client: EtcdClient, tmp_path: Path, is_launched: bool
) -> None:
    """A launch passes the section; a daemon without it opens no port before the job has a record."""
    port, secret = free_ports(1)[0], tmp_path / "token"
    secret.write_text("a secret of 32 characters, at least")
    secret.chmod(0o600)
    config = load_config(
        CONFIGS / "demo.toml",
        [f"--diagnostics.daemon_metrics_port={port}", f"--diagnostics.metrics_token_file={secret}"],
    ).config
    keys, settings = JobKeys("other"), settings_of(etcd, tmp_path)
    record = JobRecord("other", "", "", config_values(config), 1, 1, 1, "", "", 1.0)
    if is_launched:
        settings = replace(settings, section=config.diagnostics)
    try:
        with daemon_thread(settings) as thread:
            if not is_launched:
                wait_until(lambda: is_in(thread, Configuration.wait.__code__), "the daemon to wait")
                assert daemon_record(client, keys) is None
                client.put(keys.record, encode(record))
            wait_until(lambda: daemon_record(client, keys) is not None, "the daemon's record")
            found = daemon_record(client, keys)
            assert found is not None
            assert found.metrics_port == port
            assert answer_of(port) == HTTPStatus.UNAUTHORIZED
    finally:
        client.delete(keys.record)


def test_daemon_knows_the_ranks_that_an_earlier_one_has_stored(etcd: EtcdServers, tmp_path: Path) -> None:
    """Hosts send their ranks once."""
    with SegmentStore(RunDirectory(tmp_path).events) as store:
        store.append(Ranks, to_arrow(SyntheticJob(Layout(dp_size=4), round=7).ranks()))
        store.commit()

    def known_round() -> int | None:
        state, _ = read_state(RunDirectory(tmp_path).diagnosis)
        return None if state is None else state.round

    with daemon_thread(launched_settings(etcd, tmp_path)):
        wait_until(lambda: known_round() == 7, "the state with the round of the ranks")


def test_daemon_without_configuration_can_be_stopped(etcd: EtcdServers, tmp_path: Path) -> None:
    with daemon_thread(settings_of(etcd, tmp_path)) as thread:
        wait_until(lambda: is_in(thread, Configuration.wait.__code__), "the daemon to wait")
    assert not thread.is_alive()


def is_blocked(directory: Path) -> bool:
    """Put a file in the place of a directory; return whether that worked: the daemon may create it again first."""
    shutil.rmtree(directory, ignore_errors=True)
    try:
        directory.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@pytest.mark.slow
def test_store_that_cannot_be_created_again_is_reported(etcd: EtcdServers, tmp_path: Path) -> None:
    events = tmp_path / "events"

    def problem() -> str | None:
        state, _ = read_state(tmp_path / "diagnosis")
        return None if state is None else state.problem

    with daemon_thread(launched_settings(etcd, tmp_path)):
        wait_until(lambda: problem() == "", "the state of a daemon that works")
        wait_until(lambda: is_blocked(events), "a file in the place of the store")
        wait_until(lambda: f"{events}: events cannot be written there" in (problem() or ""), "the problem")
        events.unlink()
        wait_until((events / "lock").exists, "the store")
        wait_until(lambda: problem() == "", "the end of the problem")


@pytest.mark.slow
def test_removed_files_of_the_daemon_are_created_again(etcd: EtcdServers, client: EtcdClient, tmp_path: Path) -> None:
    run, finder = tmp_path / "run", WatchedDaemon(client, KEYS)
    client.put(KEYS.round(3), encode(Round(3, 4, (), "127.0.0.1", 1, "a test", "driver", 1.0)))
    with Sender("host-1", finder, tmp_path / "spool") as sender, running_daemon(run, etcd.urls) as daemon:
        sender.send(Spans, span_rows(100, round_number=3, rank=3))
        assert sender.flush(DEADLINE_S)
        wait_until((run / "diagnosis" / "state.json").exists, "the state")
        shutil.rmtree(run)
        reported = f"{run / 'events'} was removed from outside: the events stored there are lost; new events are stored"
        wait_until((run / "daemon.log").exists, "a new log")
        wait_until((run / "events" / "lock").exists, "the store")
        wait_until((run / "diagnosis" / "state.json").exists, "the state")
        with pytest.raises(StoreError, match="a job has a single daemon"):
            EventStore(run / "events")
        sender.send(Spans, span_rows(7, first=100, round_number=3, rank=3))
        assert sender.flush(DEADLINE_S)
        assert StoredEvents(run / "events").read(Spans).sequence.tolist() == list(range(100, 107))
        assert "this log was removed from outside" in daemon.log or reported in daemon.log
    finder.close()
