"""`megatrain host check`: reports of hosts and of pairs are collected, and hosts without a report are named."""

from __future__ import annotations

import time

import pytest

from megatrain.contracts.records.host_records import CheckOutcome, CheckReport, CheckResult
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.job_requests import JobRequest
from megatrain_job.coordination.client import EtcdClient
from tests.helpers.answering_driver import AnsweringDriver, Record, answer
from tests.helpers.written_job import fill
from tests.unit.launcher.cli.conftest import Run


def make_report(host: str, outcome: CheckOutcome) -> CheckReport:
    results = (CheckResult("disk", CheckOutcome.PASSED, "80 GB free", 0.1),
               CheckResult("matmul", outcome, "2.1 x its own median", 0.5, 2.1, "x"))  # fmt: skip
    return CheckReport(host, "s", time.time(), results)


def test_check_reports_of_hosts_are_gathered(client: EtcdClient, keys: JobKeys, megatrain: Run) -> None:
    fill(client, keys, has_driver=False)

    def reply(request: JobRequest) -> list[Record]:
        hosts = [request.host] if request.host else ["host-1", "host-2", "host-3"]
        outcomes = {"host-2": CheckOutcome.FAILED, "host-3": CheckOutcome.WARNING}
        reports = [make_report(host, outcomes.get(host, CheckOutcome.PASSED)) for host in hosts]
        return [answer(request, "sent", is_done=False), *reports, answer(request, "checked")]

    with AnsweringDriver(client, keys, reply):
        assert megatrain("host", "check", "--host", "host-1") == "host-1: fit: 2 passed\nchecked\n"
        text = megatrain("host", "check", code=1)
        assert text == (
            "host-1: fit: 2 passed\nhost-2: NOT FIT: 1 passed, 1 failed\n  matmul  failed  2.1 x its own median\n"
            "host-3: fit: 1 passed, 1 warning\n  matmul  warning  2.1 x its own median\n"
            "checked\n"
        )
        found = megatrain("host", "check", "--host", "host-3", "--json")
    assert (found["is_fit"], found["missing"], found["reports"][0]["host"]) == (True, [], "host-3")


def test_pairs_of_hosts_are_part_of_their_reports(client: EtcdClient, keys: JobKeys, megatrain: Run) -> None:
    fill(client, keys, has_driver=False)
    outcomes = [CheckOutcome.PASSED, CheckOutcome.WARNING]

    def met(host: str, partner: str, outcome: CheckOutcome) -> CheckReport:
        return CheckReport(host, "s", time.time(), (CheckResult("pair", outcome, "met", 1.0, partner=partner),))

    def reply(request: JobRequest) -> list[Record]:
        own = [make_report(host, CheckOutcome.PASSED) for host in ("host-1", "host-2", "host-3")]
        outcome = outcomes.pop(0)
        pair = [met("host-1", "host-2", outcome), met("host-2", "host-1", outcome)]
        return [*own, *pair, answer(request, "1 pair met")]

    with AnsweringDriver(client, keys, reply):
        for code, reported in ((0, "3 passed\n"), (1, "2 passed, 1 warning\n  pair  warning  met\n")):
            text = megatrain("host", "check", code=code)
            assert text == f"host-1: fit: {reported}host-2: fit: {reported}host-3: fit: 2 passed\n1 pair met\n"


@pytest.mark.parametrize("is_last", [True, False])
def test_a_host_that_reports_nothing_is_named(client: EtcdClient, keys: JobKeys, megatrain: Run, is_last: bool) -> None:
    fill(client, keys, has_driver=False)

    def reply(request: JobRequest) -> list[Record]:
        records: list[Record] = [answer(request, "sent", is_done=False), make_report("host-1", CheckOutcome.PASSED)]
        return [*records, answer(request, "host-2 left; host-3 left")] if is_last else records

    with AnsweringDriver(client, keys, reply):
        found = megatrain("host", "check", "--timeout", "0.5", "--json", code=1)
    assert (found["is_fit"], found["missing"]) == (False, ["host-2", "host-3"])
    why = "host-2 left; host-3 left" if is_last else f"job '{keys.job}': check was requested 500 ms ago and accepted"
    assert f"no report from host-2 and host-3: {why}" in megatrain.notes
