"""`megatrain diag on|off|set`: the settings that it writes to etcd, from current ones and the configuration."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.diag_records import DiagSettings
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import JobRecord
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.wire import KeyRange
from tests.helpers.etcd_proxy import EtcdProxy
from tests.helpers.etcd_server import EtcdServers

KEYS = JobKeys("demo")
Switch = Callable[..., DiagSettings]


@pytest.fixture(scope="module")
def client(etcd: EtcdServers) -> Iterator[EtcdClient]:
    """A client of an etcd with a job whose configuration streams one step in 7."""
    with EtcdClient(EtcdSettings.of(etcd.urls)) as one:
        yield one
        one.delete(KeyRange.prefix(KEYS.prefix))


@pytest.fixture
def diag(client: EtcdClient, capsys: pytest.CaptureFixture[str]) -> Switch:
    config = {"diagnostics.sample_period": "7"}
    client.delete(KEYS.diag_settings)
    client.put(KEYS.record, encode(JobRecord("demo", "", "", config, 1, 1, 1, "run", "a", 0.0)))
    endpoint = f"--rdzv-endpoint={client.gateway.ring.endpoints[0]}"

    def run(*arguments: str) -> DiagSettings:
        assert main(["diag", *arguments, "demo", endpoint]) == 0
        item = client.get(KEYS.diag_settings)
        return DiagSettings() if item is None else decode(DiagSettings, item.value, KEYS.diag_settings)

    return run


def test_off_and_on_use_the_configured_period(diag: Switch, client: EtcdClient) -> None:
    before = time.time()
    settings = diag("off", "--reason=too slow")
    assert (settings.is_on, settings.span_mask(), settings.sample_period, settings.reason) == (False, 0, 7, "too slow")
    assert "@" in settings.by
    assert before <= settings.at_unix_s <= time.time()
    settings = diag("on")
    assert (settings.is_on, settings.sample_period, settings.off_operations) == (True, 7, ())
    config = {"diagnostics.sample_period": str(2**31 - 1)}
    client.put(KEYS.record, encode(JobRecord("demo", "", "", config, 1, 1, 1, "run", "a", 0.0)))
    assert diag("on").sample_period == 2**31 - 1


def test_request_changes_only_what_it_names(diag: Switch, client: EtcdClient) -> None:
    diag("set", "--without=tp-all-gather,gc")
    settings = diag("set", "--sample-period=50")
    assert (settings.sample_period, settings.off_operations) == (50, ("gc", "tp-all-gather"))
    before = time.time()
    settings = diag("set", "--full-for=60")
    assert before + 60 <= settings.full_until_unix_s <= time.time() + 60
    assert (settings.period_at(before), settings.period_at(before + 120)) == (1, 50)
    assert diag("set", "--full-for=0").full_until_unix_s == 0.0
    assert diag("set", "--without=").off_operations == ()
    assert diag("on").sample_period == 7


def test_without_a_request_the_current_settings_are_printed(
    diag: Switch, client: EtcdClient, capsys: pytest.CaptureFixture[str]
) -> None:
    diag("set")
    assert client.get(KEYS.diag_settings) is None, "nothing is written"
    assert "one step in 7" in capsys.readouterr().out
    diag("set", "--without=gc", "--json")
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (document["job"], document["off_operations"], document["schema_version"]) == ("demo", ["gc"], 1)
    diag("off")
    assert "not timed (`megatrain diag on` times them)" in capsys.readouterr().out


def test_unreadable_switch_is_replaced_only_on_request(
    diag: Switch, client: EtcdClient, capsys: pytest.CaptureFixture[str]
) -> None:
    client.put(KEYS.diag_settings, b'{"schema_version": 1, "sample_period": "x"}')
    assert main(["diag", "set", "demo", f"--rdzv-endpoint={client.gateway.ring.endpoints[0]}"]) != 0
    assert "sample_period" in capsys.readouterr().err
    assert diag("on").sample_period == 7


def test_two_requests_at_once_both_take_effect(
    diag: Switch, client: EtcdClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """The daemon requests full steps between the read and the write of the command."""
    others = [DiagSettings(full_until_unix_s=5e9, sample_period=9)]

    def interrupt(request: bytes) -> None:
        if b"/v3/kv/txn" in request and others:
            client.put(KEYS.diag_settings, encode(others.pop()))

    with EtcdProxy(client.gateway.ring.endpoints[0].port) as proxy:
        proxy.before = interrupt
        assert main(["diag", "set", "--without=gc", "demo", f"--rdzv-endpoint={proxy.url}"]) == 0
    assert not others
    settings = diag("set")
    assert (settings.full_until_unix_s, settings.sample_period, settings.off_operations) == (5e9, 9, ("gc",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["set", "--without=gc,forward"], "'forward' is not an operation; use step, data-wait"),
        (["set", "--sample-period=0"], "from 1 to 2147483647"),
        (["set", "--full-for=nan"], "seconds from 0 to 604800"),
        (["off", "--sample-period=3"], "unknown argument '--sample-period=3'"),
    ],
)
def test_invalid_request_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diag", *arguments, "demo"]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_unknown_job_is_reported(client: EtcdClient, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = f"--rdzv-endpoint={client.gateway.ring.endpoints[0]}"
    assert main(["diag", "on", "other", endpoint]) != 0
    assert "etcd has no job of this name" in capsys.readouterr().err
