"""Verdicts on the command line of the launcher: waiting verdicts are shown, and can be approved or dismissed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.contracts.records.host_records import CheckOutcome, CheckReport, CheckResult
from megatrain.contracts.records.host_verdict import AuditEntry, OutcomeKind, VerdictOutcome
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.job_requests import Answer, JobRequest, RequestKind
from megatrain.contracts.records.record import encode
from megatrain.run_files.incidents import AUDIT_NAME, read_audit
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.jobs.assessment import assess
from megatrain_job.jobs.documents import status_document
from megatrain_job.jobs.health import HealthLevel
from megatrain_job.jobs.snapshot import read_job
from megatrain_launcher.commands.status_text import status_lines
from megatrain_launcher.driver.incident_files import IncidentFiles
from tests.helpers.answering_driver import AnsweringDriver, Record, answer
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.launched_job import NOW_S, make_host, make_record, make_snapshot
from tests.helpers.written_job import fill
from tests.helpers.written_verdicts import STRAGGLER
from tests.unit.launcher.cli.conftest import Run

WAITING = VerdictOutcome(
    "v-1", OutcomeKind.WAITING, "waits for a person: host-2: slow because of compute", "host-1", NOW_S
)


def test_status_shows_verdicts_that_wait_for_a_person() -> None:
    snapshot = make_snapshot(waiting=((WAITING, STRAGGLER),))
    answer = assess(snapshot, NOW_S)
    assert answer.health.level is HealthLevel.AMBER
    (line,) = [line for line in status_lines(snapshot, answer, NOW_S) if "v-1" in line]
    assert line.strip() == (
        "!  verdict-waiting: verdict v-1 waits for a person: host-2: slow because of compute "
        "(`megatrain job approve --verdict v-1`, or dismiss) (for 0 s)"
    )
    (reported,) = status_document(snapshot, answer, NOW_S)["waiting_verdicts"]
    assert (reported["outcome"]["kind"], reported["verdict"]["hosts"]) == ("waiting", ["host-2"])


def test_verdict_waits_until_it_has_a_final_outcome(client: EtcdClient, keys: JobKeys) -> None:
    client.put(keys.record, encode(make_record()))
    client.put(keys.verdict("v-1"), encode(STRAGGLER))
    client.put(keys.verdict("v-2"), b"junk")
    for name, kind in (("v-1", OutcomeKind.WAITING), ("v-2", OutcomeKind.DECLINED), ("v-3", OutcomeKind.WAITING)):
        client.put(keys.outcome(name), encode(VerdictOutcome(name, kind, "why", "host-1", NOW_S)))
    snapshot = read_job(client, keys)
    assert [(one.verdict_id, verdict) for one, verdict in snapshot.waiting] == [("v-1", STRAGGLER)]
    assert snapshot.unreadable == (), "the driver answers unreadable verdicts"
    client.put(keys.outcome("v-1"), encode(VerdictOutcome("v-1", OutcomeKind.ACTED, "done", "host-1", NOW_S)))
    assert read_job(client, keys).waiting == ()


def test_verdict_is_approved_and_dismissed_with_a_reason(
    client: EtcdClient, keys: JobKeys, etcd: EtcdServers, capsys: pytest.CaptureFixture[str]
) -> None:
    client.put(keys.record, encode(make_record()))
    client.put(keys.host("host-1"), encode(make_host(1)))
    endpoint = ("--rdzv-endpoint", ",".join(etcd.urls))

    def reply(request: JobRequest) -> list[Answer]:
        return [Answer(request.request_id, True, True, "it is done", NOW_S)]

    for kind in (RequestKind.APPROVE, RequestKind.DISMISS):
        with AnsweringDriver(client, keys, reply) as driver:
            arguments = ["job", str(kind), keys.job, "--verdict", "v-1", *endpoint, "--reason", "seen"]
            assert main([*arguments, "--json"]) == 0
        (request,) = driver.requests
        assert (request.kind, request.verdict, request.reason) == (kind, "v-1", "seen")
        reported = json.loads(capsys.readouterr().out)
        assert (reported["verdict"], reported["is_accepted"], reported["text"]) == ("v-1", True, "it is done"), kind


def test_a_verdict_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "approve"]) == 2
    assert "no verdict is named; write megatrain job approve [JOB] --verdict ID" in capsys.readouterr().err


def test_audit_has_each_outcome_once_after_a_takeover(tmp_path: Path) -> None:
    """A driver that takes over writes all outcomes in etcd to the audit again."""
    acted = VerdictOutcome("v-1", OutcomeKind.ACTED, "done", "host-1", NOW_S, "i-1", "me@login")
    entries = [AuditEntry(WAITING, STRAGGLER), AuditEntry(acted, STRAGGLER)]
    for _ in range(2):
        with IncidentFiles(tmp_path / "incidents") as files:
            for entry in entries:
                files.audit(entry)
        assert read_audit(tmp_path / "incidents" / AUDIT_NAME) == (entries, 0)


def test_unwritable_audit_is_reported(tmp_path: Path) -> None:
    (tmp_path / AUDIT_NAME).mkdir()
    files = IncidentFiles(tmp_path)
    with files:
        files.audit(AuditEntry(WAITING, STRAGGLER))
    assert "the outcome of verdict 'v-1' cannot be written" in files.problem


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
