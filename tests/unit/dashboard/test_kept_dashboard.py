"""The daemon keeps the page: it is there soon after the daemon, comes back when it is killed, goes with the daemon."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain.contracts.diag_records import DashboardRecord
from megatrain.contracts.record import decode, encode
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.settings import EtcdSettings
from megatrain.programs.processes import process_stat
from tests.helpers.daemon_process import KEYS, running_daemon
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.launched_job import make_record
from tests.helpers.waiting import wait_until

_DEADLINE_S = 40.0


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServers]:
    with EtcdServers(tmp_path, 1) as servers, EtcdClient(EtcdSettings.of(servers.urls)) as client:
        client.put(KEYS.record, encode(make_record()))  # what the daemon would wait for
        yield servers


def test_the_page_comes_with_the_daemon_and_goes_with_it(etcd: EtcdServers, tmp_path: Path) -> None:
    with EtcdClient(EtcdSettings.of(etcd.urls)) as client:
        with running_daemon(tmp_path / "run", etcd.urls, has_dashboard=True) as daemon:
            first = page(client, other_than="")
            assert answers(first)
            dashboard = child_of(daemon.process.pid)
            os.kill(dashboard, signal.SIGKILL)
            second = page(client, other_than=first.session)
            assert answers(second)
            dashboard = child_of(daemon.process.pid)
            assert daemon.end() == 0
        wait_until(lambda: is_gone(dashboard), "the end of the page", _DEADLINE_S)
        wait_until(lambda: client.get(KEYS.dashboard) is None, "the end of its record", _DEADLINE_S)
    assert "dashboard of job demo at" in (tmp_path / "run" / "logs" / "dashboard.log").read_text()


def test_a_page_does_not_outlive_a_daemon_that_is_killed(etcd: EtcdServers, tmp_path: Path) -> None:
    with EtcdClient(EtcdSettings.of(etcd.urls)) as client:
        with running_daemon(tmp_path / "run", etcd.urls, has_dashboard=True) as daemon:
            page(client, other_than="")
            dashboard = child_of(daemon.process.pid)
            daemon.kill()
        wait_until(lambda: is_gone(dashboard), "the end of the page", _DEADLINE_S)


def page(client: EtcdClient, other_than: str) -> DashboardRecord:
    """Wait for the record of another life of the page, and return it."""

    def record() -> DashboardRecord | None:
        item = client.get(KEYS.dashboard)
        return None if item is None else decode(DashboardRecord, item.value, KEYS.dashboard)

    wait_until(lambda: (one := record()) is not None and one.session != other_than, "the page", _DEADLINE_S)
    found = record()
    assert found is not None
    return found


def answers(record: DashboardRecord) -> bool:
    with urllib.request.urlopen(f"{record.url}healthz", timeout=10) as answer:
        return bool(answer.status == 200)


def child_of(pid: int) -> int:
    """Return the page's process: the daemon has no other child."""

    def children() -> list[int]:
        stats = [process_stat(int(name)) for name in os.listdir("/proc") if name.isdigit()]
        return [one.pid for one in stats if one is not None and one.parent == pid and not one.is_dead]

    wait_until(lambda: len(children()) == 1, "the page's process", _DEADLINE_S)
    return children()[0]


def is_gone(pid: int) -> bool:
    stat = process_stat(pid)
    return stat is None or stat.is_dead
