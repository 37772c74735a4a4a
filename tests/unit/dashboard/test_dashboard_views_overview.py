"""The overview and the next action, from invented snapshots; and their duration at the size of the paper's job."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.config.config import Config
from megatrain.contracts.records.host_verdict import HostVerdict, OutcomeKind, VerdictConfidence, VerdictOutcome
from megatrain.contracts.records.incident import IncidentState
from megatrain.contracts.records.problem_reports import DriverReport
from megatrain.contracts.records.rounds import JobEnd, Round, RoundHost
from megatrain_dashboard.api.overview.document import OverviewDocument
from megatrain_dashboard.api.overview.view import OverviewInputs, overview_document
from megatrain_dashboard.sources.checkpoint_watch import read_checkpoints
from megatrain_dashboard.sources.facts import JobFacts
from megatrain_dashboard.sources.series_builder import COLUMNS, SeriesSnapshot
from megatrain_diagnostics.store.daemon_state import DaemonState, scores_text
from megatrain_job.jobs.run_state import RunFacts, run_state_of
from megatrain_job.jobs.snapshot import JobSnapshot
from megatrain_job.jobs.verdict_cases import VerdictWithOutcome
from tests.helpers.checkpoint_tree import make_manifest, put_main
from tests.helpers.launched_job import (
    NOW_S,
    make_cordon,
    make_halt,
    make_host,
    make_incident,
    make_snapshot,
    make_stall,
    make_status,
)
from tests.helpers.source_tree import ROOT
from tests.helpers.written_verdicts import STRAGGLER

SURE = replace(STRAGGLER, round=2)


def config(**changes: dict[str, Any]) -> Config:
    tables = tomllib.loads((ROOT / "configs" / "demo.toml").read_text())
    tables["train"]["steps"] = 2000
    for section, values in changes.items():
        tables.setdefault(section, {}).update(values)
    return Config.from_dict(tables)


def series(last: int = 1239, *, first: int = 0) -> SeriesSnapshot:
    steps = np.arange(first, last + 1, dtype=np.float64)
    columns = {name: np.full(len(steps), np.nan) for name in COLUMNS}
    columns |= {
        "first": steps, "last": steps, "at": NOW_S - (last - steps) * 2.0, "loss": 5.0 - steps / 1000,
        "tokens": np.full(len(steps), 100.0), "round": np.full(len(steps), 2.0),
        "tokens_per_s": np.full(len(steps), 50.0), "mfu": np.full(len(steps), 0.4),
    }  # fmt: skip
    columns |= {name: np.full(len(steps), 2.0) for name in ("step_s", "step_s_low", "step_s_high", "sum_s")}
    return SeriesSnapshot(np.stack([columns[name] for name in COLUMNS]))


def overview(snapshot: JobSnapshot | None = None, facts: JobFacts | None = None, **changes: Any) -> OverviewDocument:
    given = OverviewInputs(NOW_S, facts or JobFacts(config=config(), series=series()), snapshot or make_snapshot())
    return overview_document(replace(given, **changes))


def test_overview_of_a_training_job_has_its_figures() -> None:
    found = overview()
    assert (found.state, found.level, found.reasons) == ("training", "green", ())
    assert (found.step, found.step_s, found.remaining_s) == (1240, 2.0, (2000 - 1240) * 2.0)
    assert (found.tokens, found.tokens_per_s, found.mfu) == (124_000, 50.0, pytest.approx(0.4))
    assert (found.hosts.total, found.hosts.training, found.hosts.spare) == (3, 2, 1)
    assert (found.num_open_incidents, found.open_incident) == (0, "")
    lost_s = 3.2  # the only incident of launched_job, and no lost time for repeated steps without a median
    assert found.effective_time_ratio == pytest.approx(1 - lost_s / 3600)
    assert found.effective_time_ratio_last_hour == pytest.approx(1 - lost_s / 3600)


def test_a_stuck_job_is_red_and_names_the_place() -> None:
    statuses = {"host-1": make_status(1), "host-2": make_status(2, stall=make_stall())}
    found = overview(make_snapshot(statuses=statuses))
    assert found.state == "stuck"
    assert found.since_unix_s == NOW_S - 7
    assert found.reasons[0].hosts == ("host-2",)
    assert (found.level, found.reasons[0].code, found.reasons[0].runbook) == ("red", "stuck", "hang.md")


def test_cordoned_unfit_and_lost_hosts_are_counted() -> None:
    hosts = {"host-1": make_host(1), "host-3": make_host(3), "host-4": make_host(4, is_fit=False)}
    found = overview(make_snapshot(hosts=hosts, cordons={"host-3": make_cordon(3)}))
    counts = found.hosts
    assert (counts.total, counts.training, counts.cordoned, counts.unfit, counts.lost) == (4, 1, 1, 1, 1)


def test_overview_without_etcd_is_unknown_with_the_last_values() -> None:
    found = overview(etcd_problem="etcd is out of reach, what is shown is 12 s old: refused")
    assert (found.state, found.level) == ("unknown", "red")
    assert found.reasons[0].text.startswith("etcd is out of reach")
    assert (found.step, found.hosts.training, found.next_action.what) == (1240, 2, "not known")
    nothing = overview_document(OverviewInputs(NOW_S, JobFacts()))
    assert (nothing.state, nothing.headline, nothing.level) == ("unknown", "etcd has not answered yet", "red")


def test_a_job_that_is_over_does_nothing_more() -> None:
    for code, state, level in ((0, "finished", "green"), (75, "saved and stopped", "green"), (70, "failed", "red")):
        found = overview(make_snapshot(end=JobEnd(code, "because", NOW_S - 60)))
        assert (found.state, found.level, found.remaining_s) == (state, level, None)
        assert found.next_action.what == "nothing"
        assert "because" in found.next_action.why


def test_the_next_checkpoint_and_when() -> None:
    action = overview(facts=JobFacts(config=config(checkpoint={"interval": 500}), series=series())).next_action
    assert action.what == "save a checkpoint at step 1,500"
    assert action.why == "checkpoint.interval=500, in about 9 min"
    by_time = overview(facts=JobFacts(config=config(), series=series())).next_action
    assert by_time.what == "save a checkpoint within 10 min of the last one"
    assert by_time.why == "checkpoint.interval_s=600"
    end = overview(facts=JobFacts(config=config(checkpoint={"interval_s": 0.0}), series=series())).next_action
    assert end.what == "save a checkpoint at step 2,000"
    assert "train.steps=2000" in end.why
    without = config(checkpoint={"interval_s": 0.0, "save_at_end": False})
    assert overview(facts=JobFacts(config=without, series=series())).next_action.what == "end at step 2,000"


def test_a_recovery_shows_its_phase_and_the_drivers_action() -> None:
    moments = replace(make_incident().moments, joined=None, loaded=None, first_step=None)
    opened = make_incident("0002", state=IncidentState.OPEN, moments=moments)
    report = DriverReport("host-1", "waits until host-2 has stopped", NOW_S)
    found = overview(make_snapshot(incidents=(opened,), halts={2: make_halt()}, report=report))
    assert (found.num_open_incidents, found.open_incident) == (1, opened.incident_id)
    assert found.next_action.what == "restart: rendezvous"
    assert found.next_action.why == "waits until host-2 has stopped"


def test_a_verdict_that_waits_for_a_person() -> None:
    outcome = VerdictOutcome("v-1", OutcomeKind.WAITING, "waits for a person: host-2 is slow", "host-1", NOW_S)
    found = overview(make_snapshot(waiting=((outcome, SURE),)))
    assert (found.next_action.what, found.next_action.verdict_id) == ("evict host-2, once a person approves it", "v-1")
    assert found.level == "amber"


def test_unanswered_verdict_is_the_next_action() -> None:
    for eviction, what in (
        ("automatic", "evict host-2"),
        ("approval", "evict host-2, once a person approves it (diagnostics.eviction)"),
        ("dry-run", "evict host-2, if diagnostics.eviction were not dry-run"),
    ):
        facts = JobFacts(config=config(diagnostics={"eviction": eviction}), series=series(), cases=(_case(SURE),))
        action = overview(facts=facts).next_action
        assert (action.what, action.verdict_id) == (what, "v-1")
        assert "its forward takes" in action.why


def test_reason_why_a_certain_verdict_evicts_no_host() -> None:
    declined = VerdictOutcome("v-1", OutcomeKind.DECLINED, "the gain is less than the cost", "host-1", NOW_S)
    facts = JobFacts(config=config(), series=series(), cases=(_case(SURE, declined),))
    for hosts, who in ((("host-2",), "host-2 is"), (("host-2", "host-3"), "host-2 and host-3 are")):
        cases = (_case(replace(SURE, hosts=hosts), declined),)
        assert overview(facts=replace(facts, cases=cases)).next_action.why.endswith(
            f"{who} not evicted: the gain is less than the cost (verdict v-1)"
        )
    acted = replace(declined, kind=OutcomeKind.ACTED)
    assert "not evicted" not in overview(facts=replace(facts, cases=(_case(SURE, acted),))).next_action.why


def test_verdict_without_consequence_is_not_the_next_action() -> None:
    for verdict in (replace(SURE, round=1), replace(SURE, confidence=VerdictConfidence.LOW), replace(SURE, hosts=())):
        facts = JobFacts(config=config(), series=series(), cases=(_case(verdict),))
        assert overview(facts=facts).next_action.what.startswith("save a checkpoint"), verdict


def test_tokens_where_some_steps_are_not_streamed(tmp_path: Path) -> None:
    late = JobFacts(config=config(), series=series(first=1000))
    assert overview(facts=late).tokens == 100 * 1240
    put_main(LocalLocation(tmp_path), 1200)
    saved = replace(late, checkpoints=read_checkpoints(str(tmp_path)))
    consumed = make_manifest().consumed_tokens
    assert overview(facts=saved).tokens == consumed + 100 * 40
    # For a recorded run whose last steps were not streamed, a checkpoint shows its progress.
    short = replace(saved, series=series(1100), run_state=run_state_of(RunFacts(is_run=True)))
    found = overview_document(OverviewInputs(NOW_S, short, is_recorded=True))
    assert (found.step, found.tokens) == (1200, consumed)


def test_losses_of_the_daemon_are_reported() -> None:
    state = DaemonState(
        job="demo", session="d", written_unix_s=0, silent=((0, 100),),
        refused_rows={"flood": 3}, dropped_rows=4, problem="disk full",
    )  # fmt: skip
    found = overview(facts=JobFacts(is_daemon_alive=False, problems=("torn",)), state=state).diagnosis
    assert (found.num_silent_ranks, len(found.silent_ranks)) == (100, 64)
    assert (found.rows_dropped, found.rows_refused, found.problems) == (4, 3, ("disk full", "torn"))
    assert found.is_daemon_alive is False


def test_the_last_step_is_the_newest_of_all_sources() -> None:
    reported = overview(facts=JobFacts()).last_step_unix_s
    assert reported is not None
    for later_s in (-5.0, 5.0):
        known = series()
        table = known.table.copy()
        table[COLUMNS.index("at"), -1] = reported + later_s
        found = overview(facts=JobFacts(series=replace(known, table=table)))
        assert found.last_step_unix_s == reported + max(0.0, later_s)


def test_job_without_its_daemon_is_amber() -> None:
    statuses = {f"host-{number}": make_status(number, is_streamed=True) for number in (1, 2)}
    found = overview(make_snapshot(statuses=statuses))
    assert (found.level, [reason.code for reason in found.reasons]) == ("amber", ["daemon-silent"])
    watched = overview(make_snapshot(statuses=statuses, daemon_session="d"))
    assert (watched.level, watched.reasons) == ("green", ())


def test_an_open_incident_is_never_beside_a_good_health() -> None:
    found = overview(make_snapshot(incidents=(make_incident("0002", state=IncidentState.OPEN, round=2),)))
    assert (found.num_open_incidents, found.level, found.reasons[0].code) == (1, "amber", "recovering")


def test_the_largest_job_has_all_its_hosts() -> None:
    """12,288 ranks on 1,536 hosts; `benchmarks dashboard` measures how long that takes."""
    count = 1536
    hosts = {
        f"host-{number}": make_host(number, host=f"host-{number}", session=f"s{number}") for number in range(count)
    }
    statuses = {name: make_status(1, host=name, session=host.session) for name, host in hosts.items()}
    parts = tuple(
        RoundHost(name, host.session, "10.0.0.1", 8 * number, 8) for number, (name, host) in enumerate(hosts.items())
    )
    round_ = Round(2, 8 * count, parts, "10.0.0.1", 1, "start", "host-1", NOW_S - 700)
    snapshot = make_snapshot(hosts=hosts, statuses=statuses, rounds={2: round_})
    state = DaemonState(
        job="demo", session="d", written_unix_s=0, step=9, round=2,
        rank_scores=scores_text([0.0] * 8 * count), host_scores=dict.fromkeys(hosts, 1.0),
    )  # fmt: skip
    incidents = tuple(make_incident(f"{number:04d}") for number in range(200))
    facts = JobFacts(config=config(), series=series(16_000), incidents=incidents)
    given = OverviewInputs(NOW_S, facts, replace(snapshot, incidents=incidents), state=state)
    assert overview_document(given).hosts.training == count


def _case(verdict: HostVerdict, outcome: VerdictOutcome | None = None) -> VerdictWithOutcome:
    return VerdictWithOutcome(verdict.verdict_id, verdict, outcome)
