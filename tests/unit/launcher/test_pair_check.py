"""The pair check that a command requests from an executor: the partner, the time limits, and the report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megatrain.contracts.records.host_records import CheckOutcome, CheckReport, HostRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import HostCommand
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_launcher.executor.host_checks import HostChecks
from megatrain_launcher.executor.settings import ExecutorSettings
from megatrain_launcher.health.child import ProbeEnd
from megatrain_launcher.health.pair_test import PairTask
from tests.helpers.single_rank import make_config

PASSED = '{"part": "pair", "number": 0, "compute_s": 0.5, "wait_s": 0.1, "reduce_s": 0.2}'


@pytest.fixture
def checked(client: EtcdClient, keys: JobKeys, tmp_path: Path):
    """Return a function that carries out a "pairs" command on host "a", and the list of its probes' calls."""
    calls: list[tuple[str, Sequence[str], Mapping[str, str], float]] = []

    def probe(name: str, arguments: Sequence[str], *, environment: Mapping[str, str], deadline_s: float) -> ProbeEnd:
        calls.append((name, arguments, environment, deadline_s))
        return ProbeEnd(0, PASSED, "", deadline_s)

    config = make_config(
        job={"run_directory": str(tmp_path)},
        runtime={"device": "cpu", "network_interface": "eth7"},
        recovery={"pair_timeout_s": 7.0},
    )
    settings = ExecutorSettings(
        config=config, etcd=EtcdSettings.of("127.0.0.1:1"), host="a", address="127.0.0.1", num_workers=2, min_hosts=1,
        max_hosts=2, feasible_hosts={1: 2, 2: 1}, environment={"LANG": "C"},
    )  # fmt: skip
    checks = HostChecks(settings, client, keys, probe)

    def check(partners: Mapping[str, str]) -> CheckReport:
        return checks.check_pair("session", HostCommand(5, "pairs", ("a", "b"), "r", partners))

    return check, calls


def register(client: EtcdClient, keys: JobKeys, host: str, port: int) -> None:
    record = HostRecord(host, f"s-{host}", 1, "127.0.0.1", port, 0, 2, "", "", "", 0.0, True)
    client.put(keys.host(host), encode(record))


def test_probe_gets_the_limits_of_the_configuration(client: EtcdClient, keys: JobKeys, checked) -> None:
    check, calls = checked
    register(client, keys, "a", 1111)
    register(client, keys, "b", 2222)
    report = check({"a": "b", "b": "a"})
    ((name, arguments, environment, deadline_s),) = calls
    assert name == "pair_probe"
    task = PairTask("b", 0, "127.0.0.1", 1111, "pairs/5/a", 2, "cpu", "eth7", 7.0)
    assert decode(PairTask, arguments[0], "the argument") == task
    assert deadline_s == 7.0 + 60.0, "the limit of the option, and a minute to load torch"
    assert (environment["LANG"], environment["GLOO_SOCKET_IFNAME"]) == ("C", "eth7")
    assert (report.host, report.session) == ("a", "session")
    (result,) = report.results
    assert (result.outcome, result.partner, result.parts_s["reduce"]) == (CheckOutcome.PASSED, "b", 0.2)


@pytest.mark.parametrize(
    ("partners", "outcome", "reason"),
    [
        ({"b": "c", "c": "b"}, CheckOutcome.SKIPPED, "this host has no partner in this turn"),
        ({"a": "b", "b": "a"}, CheckOutcome.WARNING, "all-reduce with b: .* host b is not registered"),
    ],
)
def test_pair_without_a_partner_starts_no_probe(
    client: EtcdClient, keys: JobKeys, checked, partners: Mapping[str, str], outcome: CheckOutcome, reason: str
) -> None:
    check, calls = checked
    register(client, keys, "a", 1111)
    (result,) = check(partners).results
    assert result.outcome is outcome
    assert re.search(reason, result.detail)
    assert not calls
