"""Verdicts on the command line of the launcher: waiting verdicts are shown, and can be approved or dismissed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.cli import main
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
from tests.helpers.answering_driver import AnsweringDriver
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.launched_job import NOW_S, make_host, make_record, make_snapshot
from tests.helpers.written_verdicts import STRAGGLER

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
