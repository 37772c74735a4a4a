"""The daemon beside a real etcd: found by its record, killed at any moment, and what it says where it cannot serve."""

from __future__ import annotations

import base64
import shutil
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import CodeType

import pytest

from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.config.load import load_config
from megatrain.config.serialize import config_of_values, config_values
from megatrain.contracts.diag_records import DaemonRecord
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.record import decode, encode
from megatrain.contracts.rounds import JobRecord, Round
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.settings import EtcdSettings
from megatrain_diagnostics import daemon
from megatrain_diagnostics.collector.settings import DaemonSettings
from megatrain_diagnostics.daemon import Configuration, run_daemon
from megatrain_diagnostics.events.tables import Spans
from megatrain_diagnostics.store.daemon_state import read_state
from megatrain_diagnostics.store.event_store import EventStore
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.retention import Retention
from megatrain_diagnostics.store.segments import StoreError
from megatrain_diagnostics.wire.discovery import WatchedDaemon
from megatrain_diagnostics.wire.sender import Sender
from tests.helpers.daemon_process import KEYS, daemon_record, running_daemon
from tests.helpers.etcd_proxy import EtcdProxy
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.event_collector import span_rows
from tests.helpers.waiting import DEADLINE_S, wait_until

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    with EtcdServers(tmp_path_factory.mktemp("etcd")) as servers:
        yield servers


@pytest.fixture
def client(etcd: EtcdServers) -> Iterator[EtcdClient]:
    with EtcdClient(EtcdSettings.of(etcd.urls)) as client:
        yield client


@pytest.mark.slow
def test_a_killed_daemon_loses_nothing_that_it_acknowledged_and_the_next_one_gets_the_rest(
    etcd: EtcdServers, client: EtcdClient, tmp_path: Path
) -> None:
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

            wait_until(has_acknowledged, "acknowledgements")
            first.kill()
            acknowledged = sender.state().outbox.acknowledged_rows - 1  # a row of clocks
        stored = StoredEvents(run / "events")
        assert len(stored.read(Spans).sequence) >= acknowledged
        assert stored.problems() == ()
        with running_daemon(run, etcd.urls) as second:
            sender.send(Spans, span_rows(3, rank=4, round_number=3))
            assert sender.flush(DEADLINE_S)
            wait_until(lambda: "3 rows rejected: out-of-range" in second.log, "the complaint")
            assert "skipped" in second.log  # what is no round
            wait_until(lambda: written_state(run) == ({"out-of-range": 3}, ("host-1",)), "the state that it tells")
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
    """Return what the running daemon tells of refused rows and of connected hosts."""
    state, _ = read_state(run / "diagnosis")
    return (None, None) if state is None else (dict(state.refused_rows), state.connected_hosts)


def settings_of(etcd: EtcdServers, run: Path, address: str = "127.0.0.1", port: int = 0) -> DaemonSettings:
    return DaemonSettings(run=run, job="other", etcd=EtcdSettings.of(etcd.urls), address=address, port=port)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_this_machines_is_refused_naming_the_key(
    etcd: EtcdServers, tmp_path: Path, address: str
) -> None:
    with pytest.raises(ConfigError, match=f"diagnostics.daemon_address='{address}', daemon_port=0: cannot listen"):
        run_daemon(settings_of(etcd, tmp_path, address), threading.Event())


@pytest.mark.slow
def test_a_port_that_somebody_has_is_refused(etcd: EtcdServers, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"daemon_port={port}: cannot listen there: .*in use"):
            run_daemon(settings_of(etcd, tmp_path, port=port), threading.Event())


def test_a_second_daemon_of_a_run_is_refused_in_words(
    etcd: EtcdServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "_LOCK_PATIENCE_S", 0.0)
    with (
        EventStore(tmp_path / "events"),
        pytest.raises(StoreError, match="writes events there; a job has a single daemon"),
    ):
        run_daemon(settings_of(etcd, tmp_path), threading.Event())


def test_nothing_is_removed_before_it_is_known_what_is_kept() -> None:
    configuration = Configuration()
    assert configuration.retention.hours >= 1e6
    assert configuration.retention.num_bytes >= 1e18
    record = JobRecord("demo", "", "", {"diagnostics.retention_hours": "]"}, 1, 1, 1, "", "", 1.0)
    configuration.take(record)
    assert configuration.retention.hours >= 1e6
    config = load_config(
        CONFIGS / "demo.toml", ["--diagnostics.retention_hours=2.5", "--diagnostics.retention_gb=3"]
    ).config
    configuration.take(replace(record, config=config_values(config)))
    assert configuration.retention == Retention(2.5, 3e9)
    configuration.take(replace(record, config={}))  # a job that torchrun started
    assert configuration.section == DiagnosticsConfig()
    assert configuration.retention.hours == DiagnosticsConfig().retention_hours


def is_in(thread: threading.Thread, code: CodeType) -> bool:
    """Say whether a thread carries out the code of a function now."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and any(one.f_code is code for one, _ in traceback.walk_stack(frame))


def test_metrics_are_where_the_job_wants_them_also_of_a_daemon_whose_address_was_said(
    etcd: EtcdServers, client: EtcdClient, tmp_path: Path
) -> None:
    """The job's record, which names the port, comes only when the daemon waits for it, or has announced itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = load_config(CONFIGS / "demo.toml", [f"--diagnostics.daemon_metrics_port={port}"]).config
    keys, stop, is_announced = JobKeys("other"), threading.Event(), threading.Event()
    record, announcement = (b'"%s"' % base64.b64encode(key.encode()) for key in (keys.record, keys.daemon))

    def hold_record(request: bytes) -> None:
        if announcement in request:
            is_announced.set()
        elif record in request:
            wait_until(lambda: is_announced.is_set() or is_in(thread, Configuration.wait.__code__), "the daemon")

    client.put(keys.record, encode(JobRecord("other", "", "", config_values(config), 1, 1, 1, "", "", 1.0)))
    with EtcdProxy(etcd.members[0].client_port) as proxy:
        proxy.before = hold_record
        settings = replace(settings_of(etcd, tmp_path), etcd=EtcdSettings.of([proxy.url]))
        thread = threading.Thread(target=run_daemon, args=(settings, stop))
        thread.start()
        try:
            wait_until(lambda: client.get(keys.daemon) is not None, "the daemon's record")
            item = client.get(keys.daemon)
            assert item is not None
            assert decode(DaemonRecord, item.value, keys.daemon).metrics_port == port
        finally:
            stop.set()
            thread.join()
            client.delete(keys.record)


@pytest.mark.parametrize("name", ["demo.toml", "gpt_125m.toml"])
def test_a_configuration_survives_the_way_through_a_record(name: str) -> None:
    config = load_config(CONFIGS / name).config
    assert config_of_values(config_values(config), "demo") == config


@pytest.mark.parametrize("text", ["]", "", "1 2", '"'])
def test_a_text_that_is_no_value_is_refused_naming_its_key(text: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.steps of job 'demo' is"):
        config_of_values({"train.steps": text}, "demo")


@pytest.mark.slow
def test_a_daemon_whose_files_somebody_removes_makes_them_anew(
    etcd: EtcdServers, client: EtcdClient, tmp_path: Path
) -> None:
    run, finder = tmp_path / "run", WatchedDaemon(client, KEYS)
    client.put(KEYS.round(3), encode(Round(3, 4, (), "127.0.0.1", 1, "a test", "driver", 1.0)))
    with Sender("host-1", finder, tmp_path / "spool") as sender, running_daemon(run, etcd.urls) as daemon:
        sender.send(Spans, span_rows(100, round_number=3, rank=3))
        assert sender.flush(DEADLINE_S)
        wait_until((run / "diagnosis" / "state.json").exists, "the state")
        shutil.rmtree(run)
        told = f"{run / 'events'} was removed by somebody: the events stored there are lost, new ones are stored"
        wait_until((run / "daemon.log").exists, "a new log")
        wait_until((run / "events" / "lock").exists, "the store")
        wait_until((run / "diagnosis" / "state.json").exists, "the state")
        with pytest.raises(StoreError, match="a job has a single daemon"):
            EventStore(run / "events")
        sender.send(Spans, span_rows(7, first=100, round_number=3, rank=3))
        assert sender.flush(DEADLINE_S)
        assert StoredEvents(run / "events").read(Spans).sequence.tolist() == list(range(100, 107))
        assert "this log was removed by somebody" in daemon.log or told in daemon.log
    finder.close()
