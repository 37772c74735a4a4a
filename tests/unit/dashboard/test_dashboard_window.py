"""A part of a run: by steps, by time, or back from now; the same in every view, without a gap."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatrain.checkpoint.survey import CheckpointState, FoundCheckpoint, Survey
from megatrain.checkpoint_format.lineage import Candidate
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.resume_point import ResumePoint
from megatrain.contracts.errors import UsageError
from megatrain.contracts.records.incident import IncidentState
from megatrain.run_files.action_log import ActionLog
from megatrain.run_files.config_changes import CHANGES_NAME, ConfigChange, append_change, changed_keys
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.api.checkpoints import checkpoints_document
from megatrain_dashboard.api.incidents.view import incidents_within
from megatrain_dashboard.api.marks import MAX_MARKS_OF_A_KIND, marks_document
from megatrain_dashboard.api.overview.series_view import series_document
from megatrain_dashboard.sources.facts import CheckpointsSeen, JobFacts
from megatrain_dashboard.sources.series_builder import COLUMNS, SeriesBuilder, SeriesSnapshot
from megatrain_dashboard.sources.series_detail import SeriesDetail
from megatrain_dashboard.sources.series_reader import SeriesReader
from megatrain_dashboard.sources.window import WHOLE_RUN, Window, bound_of, window_of
from megatrain_diagnostics.analysis.effective_time import Restart
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.rounds_and_hosts import rounds_seen
from megatrain_job.jobs.notes import Author, NoteWriter, log_path
from tests.helpers.launched_job import NOW_S, make_incident
from tests.helpers.recorded_run import FAILED_S, SPIKE_STEP, START_S, end_s, write_recorded_run
from tests.helpers.refusals import refusal
from tests.helpers.served_run import RecordedPage

BEGAN_S = 1_000_000.0
GAP_S = 600.0


def steps_with_a_gap(num: int = 100, gap_at: int = 50) -> SeriesSnapshot:
    """Return steps 0 to num - 1 of a second each; before step `gap_at` nothing is trained for ten minutes."""
    steps = np.arange(num, dtype=np.float64)
    at = BEGAN_S + steps + 1 + np.where(steps >= gap_at, GAP_S, 0.0)
    known = {"first": steps, "last": steps, "at": at, "sum_s": np.ones(num), "step_s": np.ones(num)}
    known |= {"round": np.where(steps >= gap_at, 2.0, 1.0), "loss": 5 - steps / 100}
    table = np.stack([known.get(name, np.full(num, np.nan)) for name in COLUMNS])
    gap = Restart(1, BEGAN_S + gap_at, BEGAN_S + gap_at + GAP_S)
    return SeriesSnapshot(table, (), (gap,), ((1, 0, gap_at - 1), (2, gap_at, num - 1)))


def iso(at_s: float) -> str:
    return np.datetime_as_string(np.datetime64(int(at_s * 1000), "ms")) + "Z"


END_S = BEGAN_S + 100 + GAP_S


RANGES = [
    ("", "", WHOLE_RUN),
    ("10", "", Window(10, None, BEGAN_S + 10, None)),
    ("10", "19", Window(10, 19, BEGAN_S + 10, BEGAN_S + 20)),
    ("", "19", Window(None, 19, None, BEGAN_S + 20)),
    ("90", "500", Window(90, 500, BEGAN_S + 90 + GAP_S, None)),
    ("-20s", "", Window(79, None, END_S - 20, None)),
    ("-1d", "", Window(0, None, END_S - 86400, None)),
    (iso(BEGAN_S + 10.5), iso(BEGAN_S + 12.5), Window(10, 11, BEGAN_S + 10.5, BEGAN_S + 12.5)),
    (iso(BEGAN_S + 100), iso(BEGAN_S + 200), Window(50, 49, BEGAN_S + 100, BEGAN_S + 200)),
    (iso(BEGAN_S - 99), iso(BEGAN_S - 9), Window(0, -1, BEGAN_S - 99, BEGAN_S - 9)),
    (iso(END_S + 5), "", Window(100, None, END_S + 5, None)),
    ("20", iso(BEGAN_S + 30), Window(20, 29, BEGAN_S + 20, BEGAN_S + 30)),
]
"""The parameters `from` and `to`, and the window."""


def window(begin: str, end: str) -> Window:
    return window_of(bound_of(begin, is_begin=True), bound_of(end, is_begin=False), steps_with_a_gap(), END_S)


def test_a_range_is_the_same_by_steps_and_by_time() -> None:
    for begin, end, expected in RANGES:
        assert window(begin, end) == expected, (begin, end)


def test_malformed_range_is_refused() -> None:
    for begin, end in (
        ("20", "10"), (iso(BEGAN_S + 9), iso(BEGAN_S)), ("", "-5m"), ("2026-11-23T09:30:00", ""), ("-1w", ""),
        ("x", ""),
    ):  # fmt: skip
        assert refusal(UsageError, window, begin, end), (begin, end)


def test_range_of_time_stays_without_steps() -> None:
    empty = SeriesBuilder().snapshot()
    assert window_of(bound_of("-1h", is_begin=True), None, empty, 9000.0) == Window(None, None, 5400.0, None)


def test_a_gap_is_reported_and_no_point_is_drawn_across_it() -> None:
    series = steps_with_a_gap(gap_at=53)
    found = series_document(series, round_number=None, window=WHOLE_RUN, points=20)
    assert [(gap.begin_unix_s, gap.end_unix_s, gap.round) for gap in found.gaps] == [
        (BEGAN_S + 53, BEGAN_S + 53 + GAP_S, 1)
    ]
    assert 52 in found.step, "a point ends with the last step before the gap"
    assert len(found.step) <= 20
    # In a run of weeks, a gap of seconds is less than a pixel.
    short = SeriesSnapshot(series.table, (), (Restart(1, BEGAN_S + 53, BEGAN_S + 53.2),), series.reached)
    assert series_document(short, round_number=None, window=WHOLE_RUN, points=20).gaps == ()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recorded_run(tmp_path_factory.mktemp("window") / "run").run.root


def merged_series(events: StoredEvents) -> SeriesSnapshot:
    """Return the series of the run as in a run of weeks: old steps are merged."""
    builder = SeriesBuilder(capacity=16)
    reader = SeriesReader(events, builder)
    while reader.poll(rounds_seen(events), is_over=True):
        pass
    return builder.snapshot()


def test_old_minutes_are_shown_step_by_step(made: Path) -> None:
    events = StoredEvents(RunDirectory(made).events, num_threads=1)
    rounds = rounds_seen(events)
    whole = merged_series(events)
    assert len(whole.between(40, 59)) < 10
    detail = SeriesDetail(events)
    part = detail.part(whole, rounds, 40, 59)
    assert part.column("last").tolist() == list(range(40, 60))
    # Round 2 repeated steps 50 to 59: the first ones were withdrawn.
    assert part.column("round").tolist() == [1] * 10 + [2] * 10
    assert part.column("at").tolist() == [end_s(1 if step < 50 else 2, step) for step in range(40, 60)]
    assert detail.part(whole, rounds, 40, 59) is part, "it is cached, not read twice"
    assert detail.part(whole, rounds, 90, 99).column("loss")[SPIKE_STEP - 90] == 100.0


def test_expired_steps_are_shown_merged(made: Path, tmp_path: Path) -> None:
    events = StoredEvents(RunDirectory(made).events, num_threads=1)
    whole = merged_series(events)
    gone = SeriesDetail(StoredEvents(tmp_path / "events", num_threads=1))
    found = gone.part(whole, rounds_seen(events), 40, 59)
    assert found.column("last").tolist() == whole.between(40, 59).column("last").tolist()


@pytest.fixture(scope="module")
def run(made: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The recorded run, with two notes and a change of its configuration."""
    own = RunDirectory(tmp_path_factory.mktemp("noted") / "run")
    shutil.copytree(made, own.root)
    writer = NoteWriter(ActionLog(log_path(own.root)), clock=lambda: START_S + 500)
    writer.add("learning rate lowered", Author("ada", "operator"), step=100)
    writer.add("a cable was pulled", Author("bob", "operator"), at_unix_s=FAILED_S)
    keys = changed_keys({"optimizer.lr": "0.0003"}, {"optimizer.lr": "0.001", "train.steps": "240"})
    append_change(own.diagnosis / CHANGES_NAME, ConfigChange(2, 50, end_s(2, 50), keys))
    return own


@pytest.fixture(scope="module")
def page(run: RunDirectory) -> Iterator[RecordedPage]:
    with closing(RecordedPage(run)) as found:
        yield found


FIRST_ROUND = {"from": iso(START_S), "to": iso(START_S + 40)}
FAILURE = {"from": iso(START_S + 55), "to": iso(START_S + 95)}


def test_every_view_shows_the_requested_range(page: RecordedPage) -> None:
    assert page.ask("series", **FIRST_ROUND)["step"] == list(range(40))
    assert page.ask("series", **FIRST_ROUND)["range"]["last_step"] == 39
    assert page.ask("series", **{"from": "-15s"})["step"] == list(range(104, 120))
    assert page.ask("incidents", **FIRST_ROUND)["incidents"] == []
    assert len(page.ask("incidents", **FAILURE)["incidents"]) == 1
    assert len(page.ask("audit")["entries"]) == 2
    assert page.ask("audit", **FIRST_ROUND)["entries"] == []
    shown = page.ask("checkpoints", **FIRST_ROUND)
    assert (shown["checkpoints"], shown["num_elsewhere"]) == ([], 2)
    assert page.ask("heat/outliers", round=2, **{"from": "85", "to": "95"})["first_step"] == 85
    assert page.ask("heat/outliers", round=2, **{"from": "85", "to": "95"})["last_step"] == 95
    assert page.ask("heat/outliers", round=2, first=100, **{"from": "85", "to": "95"})["first_step"] == 100
    assert page.ask("timeline/steps", **{"from": "100000"})["steps"] == []
    assert "of this range" in page.ask("timeline", 404, **{"from": "5", "to": "6"})["text"]
    everything = page.ask("logs", round=1)["lines"]
    times = sorted(one["at_unix_s"] for one in everything)
    some = page.ask("logs", round=1, to=iso(times[0] + 0.5))
    assert 0 < len(some["lines"]) < len(everything)
    assert {one["text"] for one in page.ask("notes", **FAILURE)["notes"]} == {"a cable was pulled"}
    assert page.ask("series", 400, **{"from": "yesterday"})["error"] == "bad-request"


def test_marks_have_their_step_and_their_time(page: RecordedPage) -> None:
    found = page.ask("marks")
    marks = {one["kind"]: one for one in found["marks"]}
    assert set(marks) == {"incident", "note", "config", "checkpoint", "round", "bad"}
    assert (marks["incident"]["at_unix_s"], marks["incident"]["ref"]) == (
        FAILED_S,
        page.ask("incidents")["incidents"][0]["incident_id"],
    )
    notes = [one for one in found["marks"] if one["kind"] == "note"]
    assert [(note["step"], note["at_unix_s"], note["text"]) for note in notes] == [
        (49, FAILED_S, "bob: a cable was pulled"),
        (100, end_s(2, 100), "ada: learning rate lowered"),
    ]
    assert marks["round"]["step"] == 50
    assert marks["config"]["text"] == (
        "round 2 began with optimizer.lr=0.001 instead of 0.0003, train.steps=240 instead of nothing"
    )
    assert [one["key"] for one in found["changes"][0]["keys"]] == ["optimizer.lr", "train.steps"]
    within = page.ask("marks", **FIRST_ROUND)
    assert {one["kind"] for one in within["marks"]} == {"bad"}
    assert within["changes"] == []


def test_recorded_run_shows_notes_and_accepts_none(page: RecordedPage) -> None:
    found = page.ask("notes")
    assert [one["text"] for one in found["notes"]] == ["a cable was pulled", "learning rate lowered"]
    incident = page.ask("incidents")["incidents"][0]["incident_id"]
    assert [one["incident_ids"] for one in found["notes"]] == [[incident], []]
    assert (found["can_write"], "history of a run" in found["why_not_write"]) == (False, True)


def test_marks_of_thousands_of_checkpoints_are_merged() -> None:
    found = tuple(
        FoundCheckpoint("main", step, LocalLocation(Path("/nowhere")), CheckpointState.COMMITTED, True, 0, NOW_S + step)
        for step in range(5000)
    )
    survey = Survey("main", (), found, ResumePoint(None, "none"))
    facts = JobFacts(checkpoints=CheckpointsSeen(survey=survey), incidents=(make_incident(last_step=2500),))
    marks = marks_document(facts, WHOLE_RUN).marks
    assert len(marks) <= MAX_MARKS_OF_A_KIND + 1
    assert sum(mark.count for mark in marks if mark.kind == "checkpoint") == 5000
    first = next(mark for mark in marks if mark.kind == "checkpoint")
    assert (first.step, first.last_step, first.text) == (0, 24, "25 checkpoints")
    assert [mark.text for mark in marks if mark.kind == "incident"] == ["a worker ended"]
    few = marks_document(facts, Window(begin_s=NOW_S + 100, end_s=NOW_S + 110)).marks
    assert [one.step for one in few] == list(range(100, 111))


def test_resume_point_is_shown_in_every_range() -> None:
    place = LocalLocation(Path("/nowhere"))
    found = tuple(
        FoundCheckpoint("main", step, place, CheckpointState.COMMITTED, True, 0, NOW_S + step) for step in (10, 20, 30)
    )
    seen = CheckpointsSeen(survey=Survey("main", (), found, ResumePoint(Candidate("main", 30, place), "the newest")))
    shown = checkpoints_document(seen, Window(begin_s=NOW_S, end_s=NOW_S + 15))
    assert [checkpoint.step for checkpoint in shown.checkpoints] == [30, 10]
    assert shown.num_elsewhere == 1


def test_open_incident_is_in_every_later_range() -> None:
    incident = make_incident()
    later = Window(begin_s=NOW_S - 10, end_s=NOW_S)
    assert incidents_within((incident,), later) == ()
    lasting = replace(incident, state=IncidentState.OPEN)
    assert incidents_within((lasting,), later) == (lasting,)
    assert incidents_within((lasting,), Window(end_s=incident.moments.began - 1)) == ()
