"""A running job with a real etcd: changes there and on disk are shown, and the known state stays during an outage."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.diag_records import DaemonRecord
from megatrain.contracts.records.host_records import (
    CheckOutcome,
    CheckReport,
    CheckResult,
    HangEvidence,
    HostStatus,
    RankEvidence,
    RankPosition,
)
from megatrain.contracts.records.host_verdict import AuditEntry, OutcomeKind, VerdictOutcome
from megatrain.contracts.records.incident import IncidentState
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain.run_files.incidents import AUDIT_NAME, append_to_audit
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.api.overview.route import overview_inputs
from megatrain_dashboard.api.overview.view import overview_document
from megatrain_dashboard.api.ranks.hang_source import hang_of
from megatrain_dashboard.api.stragglers.route import daemon_state_of_round
from megatrain_dashboard.sources.live_job import LiveJob
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.tables import Groups, Ranks, Spans, StepTotals, Values
from megatrain_diagnostics.store.daemon_state import write_state
from megatrain_diagnostics.store.segment_store import SegmentStore
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.jobs import etcd_job
from megatrain_job.jobs.etcd_job import MAX_PAUSE_S
from megatrain_job.jobs.snapshot import JobSnapshot, read_job
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.hung_spans import LATE, group_of_four, open_spans
from tests.helpers.launched_job import (
    NOW_S,
    make_host,
    make_incident,
    make_record,
    make_round,
    make_stall,
    make_status,
)
from tests.helpers.recorded_run import LAYOUT, step_of
from tests.helpers.synthetic_steps import SyntheticJob, empty_groups
from tests.helpers.waiting import wait_until
from tests.helpers.written_verdicts import STRAGGLER
from tests.unit.dashboard.test_daemon_state import STATE

NEVER_S = 3600.0
"""Longer than any test: etcd is read for the first time, and when a change is reported."""
_numbers = itertools.count()


class RunningPage:
    """A job in etcd, and the source that shows it."""

    def __init__(self, servers: EtcdServers, run: RunDirectory, max_pause_s: float = MAX_PAUSE_S) -> None:
        self.run = run
        run.create()
        settings = EtcdSettings.of(servers.urls)
        self.writer = EtcdClient(settings)
        self.client = EtcdClient(replace(settings, attempt_s=0.5, call_s=0.5))
        self.keys = JobKeys(f"live-{next(_numbers)}")
        self.put(self.keys.record, make_record(job=self.keys.job, run_directory=str(run.root), config={}))
        for number in (1, 2):
            self.put(self.keys.host(f"host-{number}"), make_host(number))
            self.put(self.keys.status(f"host-{number}"), make_status(number))
        self.put(self.keys.round(2), make_round(2))
        self.source = LiveJob(self.client, self.keys, run, clock=lambda: NOW_S, period_s=0.1, max_pause_s=max_pause_s)

    def put(self, key: str, record: object) -> None:
        self.writer.put(key, encode(record))

    def wait(self, is_met: object, what: str) -> None:
        assert callable(is_met)
        wait_until(is_met, what)

    def close(self) -> None:
        self.source.close()
        self.client.close()
        self.writer.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    with EtcdServers(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@pytest.fixture
def running(servers: EtcdServers, tmp_path: Path) -> Iterator[RunningPage]:
    found = RunningPage(servers, RunDirectory(tmp_path / "run"))
    try:
        yield found
    finally:
        found.close()


def shown_step(running: RunningPage) -> int | None:
    snapshot = running.source.snapshot()
    status = None if snapshot is None else snapshot.statuses.get("host-1")
    return None if status is None else status.min_step


@pytest.fixture
def watching(servers: EtcdServers, tmp_path: Path) -> Iterator[RunningPage]:
    """Yield a job that is read again only when the watch reports a change."""
    found = RunningPage(servers, RunDirectory(tmp_path / "run"), max_pause_s=NEVER_S)
    try:
        yield found
    finally:
        found.close()


def test_watch_reports_the_views_that_a_change_concerns(watching: RunningPage) -> None:
    watching.wait(lambda: shown_step(watching) == 1240, "the first poll")
    before = watching.source.live().versions
    watching.put(watching.keys.status("host-1"), make_status(1, min_step=1241, max_step=1241))
    watching.wait(lambda: shown_step(watching) == 1241, "the new step")
    after = watching.source.live().versions
    assert after["overview"] > before["overview"]
    assert after["hosts"] > before["hosts"]
    assert (after["heat"], after["logs"]) == (before["heat"], before["logs"])
    assert watching.source.etcd_problem() == ""


def test_incidents_of_etcd_and_of_the_disk_are_one_list(running: RunningPage) -> None:
    old, both = make_incident("0001"), make_incident("0002", state=IncidentState.OPEN)
    for one in (old, both):
        (running.run.incidents / f"{one.incident_id}.json").write_bytes(encode(one))
    running.put(running.keys.incident(both.incident_id), replace(both, state=IncidentState.RECOVERED))

    def found() -> list[tuple[str, str]]:
        return [(incident.incident_id, str(incident.state)) for incident in running.source.facts().incidents]

    running.wait(lambda: len(found()) == 2, "both incidents")
    # The records in etcd are newer.
    running.wait(lambda: found()[1][1] == "recovered", "the newer state")
    assert found()[0] == (old.incident_id, "recovered")


def test_verdicts_come_from_etcd_and_the_audit(running: RunningPage) -> None:
    declined = VerdictOutcome("v-0", OutcomeKind.DECLINED, "old", "host-1", 1.0)
    append_to_audit(running.run.incidents / AUDIT_NAME, AuditEntry(declined, replace(STRAGGLER, verdict_id="v-0")))
    running.put(running.keys.verdict("v-1"), STRAGGLER)
    running.put(running.keys.outcome("v-1"), replace(declined, verdict_id="v-1", kind=OutcomeKind.ACTED))
    report = CheckReport("host-1", "s1", 5.0, (CheckResult("matmul", CheckOutcome.PASSED, "fine", 1.0, 3.0, "s"),))
    running.put(running.keys.check("c-1", "host-1"), report)
    running.put(running.keys.check("c-0", "host-1"), replace(report, at_unix_s=4.0, results=()))
    running.put(running.keys.daemon, DaemonRecord("h", "d1", "127.0.0.1", 1, "token"))

    def outcomes() -> list[tuple[str, OutcomeKind | None]]:
        cases = running.source.facts().cases
        return [(case.verdict_id, case.outcome.kind if case.outcome else None) for case in cases]

    expected = [("v-0", OutcomeKind.DECLINED), ("v-1", OutcomeKind.ACTED)]
    running.wait(lambda: outcomes() == expected, "both verdicts")
    assert [case.verdict for case in running.source.facts().cases][-1:] == [STRAGGLER]
    running.wait(lambda: running.source.facts().is_daemon_alive is True, "the daemon")
    running.wait(lambda: "host-1" in running.source.facts().checks, "the checks")
    assert running.source.facts().checks["host-1"].at_unix_s == 5.0


def test_streamed_steps_are_shown_with_the_daemons_judgment(running: RunningPage) -> None:
    job = SyntheticJob(LAYOUT, round=2)
    with SegmentStore(running.run.events) as store:
        store.append(Ranks, to_arrow(job.ranks()))
        store.append(Groups, to_arrow(empty_groups()))
        for last in (10, 20):
            for step in range(last - 10, last):
                totals, values = step_of(job, 2, step)
                store.append(StepTotals, to_arrow(totals))
                store.append(Values, to_arrow(values))
            store.commit()
            running.wait(lambda last=last: running.source.live().step == last, f"step {last}")
    assert running.source.roster(None).round == 2
    before = running.source.live().versions["stragglers"]
    write_state(running.run.diagnosis, replace(STATE, round=2))
    running.wait(lambda: running.source.daemon_state() is not None, "the daemon's state")
    running.wait(lambda: running.source.live().versions["stragglers"] > before, "the new version")
    # No daemon is registered, so the record of an earlier daemon is ignored.
    running.wait(lambda: running.source.facts().is_daemon_alive is False, "the poll of the daemon")
    assert daemon_state_of_round(running.source, None) is None
    running.put(running.keys.daemon, DaemonRecord("h", "d1", "127.0.0.1", 1, "token"))
    running.wait(lambda: daemon_state_of_round(running.source, None) is not None, "the daemon")
    assert daemon_state_of_round(running.source, 1) is None


def test_executors_report_a_hang_before_anything_is_on_disk(running: RunningPage) -> None:
    group = {"dp:0+4x1": (0, 4, 1)}
    for host, ranks in (("host-1", (0, 1)), ("host-2", (2, 3))):
        reported = tuple(
            RankEvidence(rank, {"dp:0+4x1": RankPosition(6 if rank != 3 else 5, 5)}, "R", 9, "step", 1.0)
            for rank in ranks
        )
        running.put(running.keys.evidence(2, host), HangEvidence(host, "s", 2, 1.0, group, reported))
    running.wait(lambda: len(running.source.facts().evidence) == 2, "the evidence")
    answer = hang_of(running.source, 2)
    assert answer is not None
    assert [suspect.rank for suspect in answer.finding.suspects] == [3]
    assert answer.source == "reports of executors"
    assert hang_of(running.source, 1) is None


def test_stall_without_evidence_is_found_in_the_spans(running: RunningPage) -> None:
    with SegmentStore(running.run.events) as store:
        store.append(Ranks, to_arrow(SyntheticJob(LAYOUT, round=2).ranks()))
        store.append(Groups, to_arrow(group_of_four(2)))
        store.append(Spans, to_arrow(open_spans(2)))
        store.commit()
    running.wait(lambda: shown_step(running) == 1240, "the first poll")
    assert hang_of(running.source, 2) is None
    running.put(running.keys.status("host-2"), make_status(2, stall=make_stall()))
    running.wait(lambda: hang_of(running.source, 2) is not None, "the stall")
    answer = hang_of(running.source, 2)
    assert answer is not None
    assert (answer.source, [suspect.rank for suspect in answer.finding.suspects]) == ("spans", [LATE])
    assert hang_of(running.source, 1) is None


@pytest.mark.slow
def test_last_state_is_shown_during_an_etcd_outage(servers: EtcdServers, tmp_path: Path) -> None:
    with EtcdServers(tmp_path) as own:
        running = RunningPage(own, RunDirectory(tmp_path / "run"))
        try:
            running.wait(lambda: shown_step(running) == 1240, "the first poll")
            own.members[0].kill()
            wait_until(lambda: bool(running.source.etcd_problem()), "the problem")
            assert "is 0 s old" in running.source.etcd_problem()
            found = overview_document(overview_inputs(running.source, NOW_S))
            assert (found.state, found.step) == ("unknown", 1240)
            assert found.diagnosis.is_daemon_alive is None
            own.members[0].start()
            own.wait_ready()
            later = make_status(1, min_step=1250, max_step=1250)
            # An etcd that has just started may take longer than the client's short timeout here.
            wait_until(lambda: has_put(running, running.keys.status("host-1"), later), "etcd to take a value")
            running.wait(
                lambda: shown_step(running) == 1250 and not running.source.etcd_problem(), "etcd to be available again"
            )
        finally:
            running.close()


def has_put(running: RunningPage, key: str, record: Any) -> bool:
    with suppress(CoordinationError):
        running.put(key, record)
        return True
    return False


@pytest.mark.slow
def test_slowly_failed_poll_is_followed_by_another_soon(
    servers: EtcdServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_s, failures = [0.0], iter(("no answer within 10 s",))

    def read(*given: object, **named: object) -> JobSnapshot:
        for text in failures:
            late_s[0] += 10.0
            raise CoordinationError(text)
        return read_job(*given, **named)

    running = RunningPage(servers, RunDirectory(tmp_path / "run"))
    try:
        running.wait(lambda: shown_step(running) == 1240, "the first poll")
        clock = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + late_s[0])
        monkeypatch.setattr(etcd_job, "time", clock)
        monkeypatch.setattr(etcd_job, "read_job", read)
        running.put(running.keys.status("host-1"), make_status(1, min_step=1250, max_step=1250))
        wait_until(lambda: late_s[0] > 0.0, "the failure")
        wait_until(lambda: shown_step(running) == 1250, "etcd to be available again")
        assert running.source.etcd_problem() == ""
    finally:
        running.close()


def test_unreadable_record_hides_no_other(running: RunningPage) -> None:
    running.writer.put(running.keys.status("host-2"), b"torn")
    running.writer.put(running.keys.verdict("v-9"), b"torn")

    def statuses() -> set[str]:
        snapshot = running.source.snapshot()
        return set() if snapshot is None else set(snapshot.statuses)

    running.wait(lambda: statuses() == {"host-1"}, "the record to be left out")
    snapshot = running.source.snapshot()
    assert snapshot is not None
    assert isinstance(snapshot.statuses["host-1"], HostStatus)
    assert any("status/host-2" in text for text in snapshot.unreadable)
    running.wait(lambda: any(text.startswith("v-9:") for text in running.source.facts().problems), "the torn one")
