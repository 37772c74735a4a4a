"""A launch prints where its web page is, each address once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain.contracts.records.diag_records import DashboardRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_launcher.executor.job_programs import reported_dashboard
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.waiting import wait_until

KEYS = JobKeys("noticed")


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[EtcdSettings]:
    with EtcdServers(tmp_path, 1) as servers:
        yield EtcdSettings.of(servers.urls)


def put(settings: EtcdSettings, url: str, session: str, token_file: str = "") -> None:
    with EtcdClient(settings) as client:
        client.put(KEYS.dashboard, encode(DashboardRecord(url=url, session=session, token_file=token_file)))


def test_each_address_is_reported_once(settings: EtcdSettings) -> None:
    reported: list[str] = []
    with reported_dashboard(settings, KEYS, reported.append):
        put(settings, "http://127.0.0.1:8777/", "first")
        wait_until(lambda: len(reported) == 1, "the address")
        put(settings, "http://127.0.0.1:8777/", "second")
        put(settings, "http://127.0.0.1:8778/", "third", "/run/token")
        wait_until(lambda: len(reported) == 2, "the second address")
    assert reported == [
        "dashboard: http://127.0.0.1:8777/",
        "dashboard: http://127.0.0.1:8778/ (sign in with the token in /run/token)",
    ]


def test_existing_page_is_reported_and_damage_ignored(settings: EtcdSettings) -> None:
    with EtcdClient(settings) as client:
        client.put(KEYS.dashboard, b"{")
    reported: list[str] = []
    with reported_dashboard(settings, KEYS, reported.append):
        put(settings, "http://127.0.0.1:1/", "first")
        wait_until(lambda: bool(reported), "the address")
    assert reported == ["dashboard: http://127.0.0.1:1/"]
