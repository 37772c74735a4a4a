"""Parts of the sources: reading steps in pieces, files that change, log lines within a time, verdicts of two places."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.verifications import (
    VERIFIED_NAME,
    Verification,
    read_verifications,
    record_verifications,
)
from megatrain.contracts.layout import Layout
from megatrain.contracts.records.host_records import HostPhase
from megatrain.contracts.records.host_verdict import OutcomeKind, VerdictOutcome
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.api.hosts import HostInputs, host_history_document, hosts_document
from megatrain_dashboard.api.incidents.view import incident_document
from megatrain_dashboard.sources.run_files import RunFiles
from megatrain_dashboard.sources.series_builder import SeriesBuilder
from megatrain_dashboard.sources.series_reader import SeriesReader
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import LogLines, Ranks, StepTotals, Values, from_columns, select
from megatrain_diagnostics.store.log_query import LogQuery, newest_tails, search_lines
from megatrain_diagnostics.store.reader import StoredEvents, TooSlowError
from megatrain_diagnostics.store.rounds_and_hosts import rounds_seen, shown_round
from megatrain_diagnostics.store.segment_store import SegmentStore
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.jobs import etcd_job
from megatrain_job.jobs.etcd_job import EtcdJob
from megatrain_job.jobs.snapshot import JobSnapshot
from megatrain_job.jobs.verdict_cases import VerdictWithOutcome, merged_cases
from tests.helpers.launched_job import make_cordon, make_failure, make_incident, make_snapshot, make_status
from tests.helpers.recorded_run import LAYOUT, step_of
from tests.helpers.synthetic_steps import SyntheticJob
from tests.helpers.waiting import DEADLINE_S, wait_until
from tests.helpers.written_verdicts import STRAGGLER
from tests.unit.dashboard.test_daemon_state import STATE

NS = 10**9


def put_steps(directory: Path, round_number: int, steps: range, *, has_ranks: bool = True) -> None:
    job = SyntheticJob(LAYOUT, round=round_number)
    with SegmentStore(directory) as store:
        if has_ranks:
            store.append(Ranks, to_arrow(job.ranks()))
        for step in steps:
            totals, values = step_of(job, round_number, step)
            store.append(StepTotals, to_arrow(totals))
            store.append(Values, to_arrow(values))
        store.commit()


def read_all(events: StoredEvents, builder: SeriesBuilder, *, steps_at_once: int = 16) -> list[int]:
    reader = SeriesReader(events, builder, steps_at_once=steps_at_once)
    while reader.poll(rounds_seen(events), is_over=True):
        pass
    return [int(step) for step in builder.snapshot().column("last")]


def test_many_steps_are_read_in_parts(tmp_path: Path) -> None:
    put_steps(tmp_path, 1, range(100))
    assert read_all(StoredEvents(tmp_path), SeriesBuilder(), steps_at_once=7) == list(range(100))


def test_expired_steps_are_skipped(tmp_path: Path) -> None:
    put_steps(tmp_path, 1, range(5))
    put_steps(tmp_path, 1, range(500, 520), has_ranks=False)
    assert read_all(StoredEvents(tmp_path), SeriesBuilder()) == [*range(5), *range(500, 520)]


def test_round_that_one_rank_invented_is_skipped(tmp_path: Path) -> None:
    put_steps(tmp_path, 1, range(5))
    ranks = SyntheticJob(LAYOUT, round=77).ranks()
    with SegmentStore(tmp_path) as store:
        store.append(Ranks, to_arrow(select(ranks, ranks.rank == 0)))
        store.commit()
    events = StoredEvents(tmp_path)
    seen = rounds_seen(events)
    assert [(one.number, one.num_ranks, one.world_size, one.is_confirmed) for one in seen] == [
        (1, 4, 4, True),
        (77, 1, 4, False),
    ]
    shown = shown_round(seen)
    assert shown is not None
    assert shown.number == 1
    builder = SeriesBuilder()
    reader = SeriesReader(events, builder)
    while reader.poll(seen):
        pass
    # The next one is older than the invented record, and counts.
    put_steps(tmp_path, 2, range(5, 30))
    while reader.poll(rounds_seen(events), is_over=True):
        pass
    assert builder.snapshot().column("last").tolist() == list(range(30))


def test_files_are_read_again_only_when_they_have_changed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    files = RunFiles(run)
    assert not files.poll()
    path = run.incidents / "one.json"
    path.write_bytes(encode(make_incident("0001")))
    assert files.poll()
    assert not files.poll()
    path.write_bytes(b"torn")
    assert files.poll()
    assert files.incidents == ()
    assert "one.json" in files.problems[0]
    path.unlink()
    assert files.poll()
    assert files.problems == ()
    (run.incidents / "audit.jsonl").write_bytes(b"torn\n")
    assert files.poll()
    assert "1 line cannot be read" in files.problems[0]
    assert not files.poll()


def put_lines(directory: Path, count: int, *, each_s: int) -> None:
    with SegmentStore(directory) as store:
        store.append(
            LogLines,
            to_arrow(
                from_columns(
                    LogLines,
                    {
                        "round": [1] * count,
                        "rank": [number % 4 for number in range(count)],
                        "sequence": list(range(count)),
                        "at_ns": [(1_700_000_000 + number * each_s) * NS for number in range(count)],
                        "host": ["host-0"] * count,
                        "line": [f"line {number}" for number in range(count)],
                    },
                )
            ),
        )
        store.commit()


def test_newest_lines_are_found_and_all_are_counted(tmp_path: Path) -> None:
    put_lines(tmp_path, 400, each_s=600)
    put_lines(tmp_path, 10, each_s=600)  # stored twice
    events = StoredEvents(tmp_path)
    found = search_lines(events, LogQuery(1, "LINE", limit=5), budget_s=DEADLINE_S)
    assert [str(line) for line in found.lines.line] == [f"line {number}" for number in range(395, 400)]
    assert (found.num_matching, found.num_searched, found.is_partial) == (410, 410, False)
    exact = search_lines(events, LogQuery(1, "^line 7$", is_regex=True), budget_s=DEADLINE_S)
    assert exact.lines.sequence.tolist() == [7]


def test_search_that_runs_out_of_time_is_partial(tmp_path: Path) -> None:
    put_lines(tmp_path, 50, each_s=600)
    events = StoredEvents(tmp_path)
    found = search_lines(events, LogQuery(1, "line"), budget_s=0.0)
    assert found.is_partial
    assert len(found.lines.rank) == found.num_searched == 0


def test_query_ends_at_its_deadline(tmp_path: Path) -> None:
    put_lines(tmp_path, 50, each_s=1)
    events = StoredEvents(tmp_path)
    endless = "SELECT count(*) AS n FROM segments, range(100000000) AS a, range(1000) AS b WHERE a.range * b.range = -1"
    with pytest.raises(TooSlowError, match=r"no answer within 0\.1 s"):
        events.query(LogLines, Where(), endless, timeout_s=0.1)
    answer = events.query(LogLines, Where(), "SELECT count(*) AS n FROM segments", timeout_s=DEADLINE_S)
    assert answer is not None
    assert answer.to_pylist() == [{"n": 50}]


def test_newest_lines_of_each_rank_are_classified(tmp_path: Path) -> None:
    put_lines(tmp_path, 40, each_s=1)
    found = newest_tails(StoredEvents(tmp_path), Where((1,)), 8, num_ranks=4, budget_s=DEADLINE_S)
    assert sorted(found.sequence.tolist()) == list(range(32, 40))


def test_program_error_in_a_poll_is_reported_and_polling_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: object, **named: object) -> JobSnapshot:
        raise ValueError("no answer is like this")

    monkeypatch.setattr(etcd_job, "read_job", read)
    polls: list[str] = []
    with EtcdClient(EtcdSettings.of(["127.0.0.1:9"])) as client:
        job = EtcdJob(client, JobKeys("demo"), lambda before, now: polls.append(now.problem), max_pause_s=0.1)
        wait_until(lambda: len(polls) >= 2, "two polls")
        job.close()
    assert "no answer is like this" in polls[0]


def test_verdict_in_etcd_and_in_the_audit_is_one_case() -> None:
    outcome = VerdictOutcome("v-1", OutcomeKind.ACTED, "because", "host-1", 1.0)
    on_disk = [VerdictWithOutcome("v-0", STRAGGLER, outcome), VerdictWithOutcome("v-1", STRAGGLER, None)]
    in_etcd = [VerdictWithOutcome("v-1", None, outcome), VerdictWithOutcome("v-2", STRAGGLER, None)]
    found = merged_cases(on_disk, in_etcd)
    assert [one.verdict_id for one in found] == ["v-0", "v-1", "v-2"]
    assert found[1] == VerdictWithOutcome("v-1", STRAGGLER, outcome)


def test_newest_verification_of_each_checkpoint_is_kept(tmp_path: Path) -> None:
    place = LocalLocation(tmp_path)
    assert read_verifications(place) == {}
    record_verifications(place, [Verification.of("main", 10, 1.0, ["torn", "and more"])])
    record_verifications(place, [Verification.of("main", 10, 2.0, []), Verification.of("main", 20, 3.0, [])])
    with (tmp_path / VERIFIED_NAME).open("ab") as file:
        file.write(b"torn\n")
    found = read_verifications(place)
    assert sorted(found) == [("main", 10), ("main", 20)]
    assert (found["main", 10].at_unix_s, found["main", 10].num_problems) == (2.0, 0)


def test_hosts_report_why_they_do_not_train() -> None:
    snapshot = make_snapshot(cordons={"host-3": make_cordon(3)}, driver="host-2")
    state = replace(STATE, round=2, host_scores={"host-1": 4.5}, connected_hosts=("host-1",))
    clocks = {"host-1": (0.25, 0.001)}
    hosts = {host.host: host for host in hosts_document(HostInputs(snapshot, None, state, clocks)).hosts}
    assert list(hosts) == ["host-1", "host-2", "host-3"]
    first = hosts["host-1"]
    assert (first.state, first.first_rank, first.num_workers, first.step) == (str(HostPhase.RUNNING), 0, 2, 1240)
    assert (first.straggler_score, first.clock_offset_s, first.is_connected) == (4.5, 0.25, True)
    older = hosts_document(HostInputs(snapshot, None, replace(state, round=1), clocks)).hosts[0]
    assert older.straggler_score is None, "the daemon judged another round"
    assert (hosts["host-2"].is_driver, hosts["host-2"].is_connected) == (True, False)
    cordoned = hosts["host-3"]
    assert (cordoned.state, cordoned.cordon_reason, cordoned.cordon_by) == ("cordoned", "ECC errors", "ops@login")


def test_recorded_hosts_begin_with_those_of_the_round() -> None:
    roster = SyntheticJob(Layout(dp_size=4), ranks_per_host=2, round=3).roster()
    rounds = {"host-10": 1, "host-9": 2, **dict.fromkeys(roster.hosts.values(), 3)}
    found = hosts_document(HostInputs(None, roster, last_rounds=rounds)).hosts
    assert [(one.host, one.first_rank, one.num_workers, one.remark) for one in found] == [
        (roster.hosts[0], 0, 2, ""),
        (roster.hosts[2], 2, 2, ""),
        ("host-9", None, None, "last in round 2"),
        ("host-10", None, None, "last in round 1"),
    ]


def test_incidents_distinguish_culprit_and_affected_hosts() -> None:
    snapshot = make_snapshot(statuses={"host-1": make_status(1)})
    (host, *_) = hosts_document(HostInputs(snapshot)).hosts
    blamed = make_incident("0001", culprit_hosts=("host-1",), failures=())
    ended = make_incident("0002", culprit_hosts=("host-2",), failures=(make_failure(1),))
    other = make_incident("0003", culprit_hosts=("host-2",), failures=())
    found = host_history_document(host, None, [blamed, ended, other], [2, 1], lambda number, rank: "host-1")
    assert found.incident_ids == ("20270115-0001",)
    assert found.victim_incident_ids == ("20270115-0002",)
    assert (found.rounds, found.checks) == ((1, 2), ())


def test_a_phase_that_is_not_over_has_no_seconds() -> None:
    incident = make_incident()
    incident = replace(incident, moments=replace(incident.moments, joined=None, loaded=None, first_step=None))
    phases = {phase.name: phase for phase in incident_document(incident, lambda number, rank: "").phases}
    assert phases["rendezvous"].began_unix_s is not None
    assert phases["rendezvous"].seconds is None
    assert (phases["first_step"].began_unix_s, phases["first_step"].seconds) == (None, None)
