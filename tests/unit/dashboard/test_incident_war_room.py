"""The page of one incident: its story, its log lines, and the parameters, for each kind and for missing data."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from megatrain.config.config import Config
from megatrain.contracts.records.host_verdict import OutcomeKind, VerdictOutcome
from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState, Moments
from megatrain.contracts.records.notices import Receipt
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import Cordon, JobEnd
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.api.incidents.document import StoryDocument
from megatrain_dashboard.api.incidents.log_view import LogPlaces, incident_logs
from megatrain_dashboard.api.incidents.story import offered_actions, story_document
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.tables import LogLines, from_columns
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.segment_store import SegmentStore
from megatrain_job.jobs.incident_phrases import runbooks_of
from megatrain_job.jobs.verdict_cases import VerdictWithOutcome
from tests.helpers.launched_job import NOW_S, make_incident, make_snapshot
from tests.helpers.notification_topics import config_with
from tests.helpers.served_run import PATIENT_LIMITS, RecordedPage
from tests.helpers.source_tree import ROOT
from tests.helpers.written_verdicts import STRAGGLER

BEGAN_S = make_incident().moments.began
HOSTS = {0: "host-1", 1: "host-1", 2: "host-2", 3: "host-2"}


def host_of(rank: int) -> str:
    return HOSTS.get(rank, "")


def story_of(
    incident: Incident, case: VerdictWithOutcome | None = None, config: Config | None = None, **changes: Any
) -> StoryDocument:
    return story_document(incident, case, lambda _, rank: HOSTS.get(rank, ""), config, make_snapshot(**changes), NOW_S)


def test_each_kind_but_a_request_has_a_runbook() -> None:
    for kind in IncidentKind:
        pages = runbooks_of(make_incident(kind=kind, label=""))
        assert all((ROOT / "docs" / "runbooks" / page).is_file() for page in pages), pages
        assert bool(pages) is (kind is not IncidentKind.REQUEST), kind


RUNBOOKS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("worker-ended.md",)),
    ({"label": "gpu_hardware", "action": "evict"}, ("gpu-errors.md", "worker-ended.md", "host-evicted-or-cordoned.md")),
    ({"label": "no label of this version"}, ("worker-ended.md",)),
    ({"state": IncidentState.STOPPED}, ("stopped-by-the-brake.md", "worker-ended.md")),
    ({"kind": IncidentKind.REQUEST, "state": IncidentState.STOPPED}, ()),
]


def test_runbook_of_the_incident_comes_first() -> None:
    for changes, pages in RUNBOOKS:
        assert runbooks_of(make_incident(**changes)) == pages, changes


def test_a_failure_is_reported_in_order_of_time() -> None:
    reported = [(round(one.at_unix_s - BEGAN_S, 2), one.what, one.text) for one in story_of(make_incident()).happened]
    assert reported == [
        (0.1, "fault", "rank 3 on host-2 was killed by SIGKILL (9)"),
        (0.1, "noticed", "the driver of host-1 noticed it, 100 ms after it began"),
        (
            0.3,
            "step",
            "rank 1 on host-1 ended with exit code 69 (communication), network, because other ranks had ended",
        ),
        (0.4, "decision", "all workers of round 1 are gone; decided: restart"),
        (0.5, "step", "round 2 was formed"),
        (1.9, "step", "the ranks of round 2 were connected"),
        (2.3, "step", "the state was restored as it was after step 1,230"),
        (3.2, "over", "a step was completed again: 3.2 s, 4 steps lost"),
    ]


OPEN = Moments(BEGAN_S, BEGAN_S + 0.1, BEGAN_S + 0.1)
BEGIN = {
    IncidentKind.HANG: "a hang: host-2 (rank 3)",
    IncidentKind.HOST_LOST: "a host was lost: host-2 (rank 3)",
    IncidentKind.REQUEST: "it was requested: host-2 (rank 3)",
    IncidentKind.CONTROL_PLANE: "leases vanished while training went on: host-2 (rank 3)",
    IncidentKind.NUMERICS: "abnormal loss or gradients: host-2 (rank 3)",
    IncidentKind.STRAGGLER: "hosts made the job slow: host-2 (rank 3)",
    IncidentKind.LAUNCH_LOST: "the last sign of life of the previous launch",
}


def test_open_incident_without_failures_begins_with_its_kind() -> None:
    for kind, text in BEGIN.items():
        incident = make_incident(kind=kind, state=IncidentState.OPEN, failures=(), moments=OPEN, resumed_step=None)
        happened = story_of(incident).happened
        assert (happened[0].text, happened[-1].text) == (text, "decided: restart")
        assert "over" not in {one.what for one in happened}, kind


def test_the_verdict_is_reported_with_the_drivers_action() -> None:
    verdict = replace(STRAGGLER, created_unix_s=BEGAN_S - 2)
    outcome = VerdictOutcome("v-1", OutcomeKind.ACTED, "it pays", "host-1", BEGAN_S - 1, by="alice")
    incident = make_incident(kind=IncidentKind.STRAGGLER, failures=(), verdict="v-1")
    reported = [one.text for one in story_of(incident, VerdictWithOutcome("v-1", verdict, outcome)).happened[:3]]
    assert reported == [
        "the diagnosis named host-2: compute, high confidence",
        "the verdict was acted on by alice",
        "all workers of round 1 are gone; decided: restart",
    ]


def test_many_ends_of_ranks_are_reported_together() -> None:
    victims = tuple(replace(make_incident().failures[1], rank=rank) for rank in range(4, 40))
    texts = [one.text for one in story_of(make_incident(failures=(make_incident().failures[0], *victims))).happened]
    assert "29 further ranks had ended by then" in texts


def test_notified_receivers_and_failed_notifications() -> None:
    receipts = (Receipt("slack", "open", BEGAN_S + 2), Receipt("email", "open", BEGAN_S + 1, "answers 535", 2))
    story = story_of(make_incident(receipts=receipts))
    assert [(notification.what, notification.text) for notification in story.notifications] == [
        ("not-notified", "email: not notified that it began, after 2 tries: answers 535"),
        ("notified", "slack: notified that it began"),
    ]
    assert story.why_not_notified == ""


NOT_NOTIFIED: list[tuple[str, dict[str, Any], str]] = [
    ("", {}, "has no receivers"),
    (
        '[webhook]\nurl = "http://127.0.0.1:1/x"\n',
        {},
        "No notification is recorded: `events` or `level` of webhook may leave this incident out",
    ),
    ('[webhook]\nurl = "http://127.0.0.1:1/x"\n', {"kind": IncidentKind.REQUEST}, "planned"),
    (
        '[webhook]\nurl = "http://127.0.0.1:1/x"\n',
        {"state": IncidentState.OPEN, "moments": Moments(NOW_S - 2, NOW_S - 1)},
        "Not notified yet: webhook",
    ),
]
"""Sections of the configuration, changes of the incident, the reason."""


def test_reason_why_no_receiver_was_notified(tmp_path: Path) -> None:
    for sections, changes, why in NOT_NOTIFIED:
        assert why in story_of(make_incident(**changes), config=config_with(tmp_path, sections)).why_not_notified


ACTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[str, str]]]] = {
    "its host trains": ({}, {}, [("evict", "host-2"), ("cordon", "host-2")]),
    "it is being answered": ({"state": IncidentState.OPEN}, {}, [("cordon", "host-2")]),
    "its host is cordoned": (
        {},
        {"cordons": {"host-2": Cordon("host-2", "slow", "me", NOW_S)}},
        [("uncordon", "host-2")],
    ),
    "its host is a spare": ({"culprit_hosts": ("host-3",)}, {}, [("cordon", "host-3")]),
    "its host is gone": ({"culprit_hosts": ("host-9",)}, {}, []),
    "no host is blamed": ({"culprit_hosts": ()}, {}, []),
    "half the job is blamed": ({"culprit_hosts": tuple(f"host-{number}" for number in range(9))}, {}, []),
    "leases are held": ({"kind": IncidentKind.CONTROL_PLANE, "state": IncidentState.HELD}, {}, [("checkpoint", "")]),
    "it went back": ({"kind": IncidentKind.NUMERICS}, {}, [("stop", "")]),
    "it was requested": ({"kind": IncidentKind.REQUEST}, {}, []),
    "a launch was lost": ({"kind": IncidentKind.LAUNCH_LOST, "culprit_hosts": ()}, {}, []),
    "the job is over": ({}, {"end": JobEnd(1, "over", NOW_S, 2)}, []),
    "there is no round": ({}, {"rounds": {}}, []),
}


def test_offered_actions_fit_the_incident_and_the_job() -> None:
    for case, (incident, job, expected) in ACTIONS.items():
        assert list(offered_actions(make_incident(**incident), make_snapshot(**job))) == expected, case
    assert offered_actions(make_incident(), None) == (), "a recorded job"


LINES = [
    (3, -5.0, "host-2", "step 1234 loss 2.1"),
    (3, 0.05, "host-2", "CUDA error: uncorrectable ECC error encountered"),
    (1, 0.1, "host-1", "RuntimeError: Connection closed by peer [10.0.0.2]:1234"),
    (0, 0.2, "host-1", "a line of rank 0"),
    (0, -90.0, "host-1", "a line of long before"),
    (3, 60.0, "host-2", "a line of what came later under the same number"),
]
"""Rank, seconds after the incident began, host, line; all of round 1."""


def write_lines(run: RunDirectory) -> None:
    with SegmentStore(run.events) as store:
        table = from_columns(
            LogLines,
            {
                "round": [1] * len(LINES),
                "rank": [line[0] for line in LINES],
                "sequence": [100 * (place + 1) for place in range(len(LINES))],
                "at_ns": [int((BEGAN_S + line[1]) * 1e9) for line in LINES],
                "host": [line[2] for line in LINES],
                "line": [line[3] for line in LINES],
            },
        )
        store.append(LogLines, to_arrow(table))
        store.commit()


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    run = RunDirectory(tmp_path_factory.mktemp("lines"))
    write_lines(run)
    places = LogPlaces(StoredEvents(run.events, num_threads=1), run, None, host_of, PATIENT_LIMITS)
    return lambda **changes: incident_logs(make_incident(**changes), places, NOW_S)


def texts(lines: Any) -> list[str]:
    return [line.line for line in lines]


def test_lines_of_the_culprit_come_first(lines: Callable[..., Any]) -> None:
    found = lines()
    assert found.culprit_text == "rank 3 on host-2"
    assert texts(found.culprit_lines) == [LINES[0][3], LINES[1][3]]
    assert [line.is_cause for line in found.culprit_lines] == [False, True]
    assert texts(found.other_lines) == [LINES[2][3], LINES[3][3]]
    assert (found.label, found.cause_rank, found.cause_line) == ("gpu_hardware", 3, LINES[1][3])
    assert found.problem == ""


def test_incident_without_culprit_marks_no_line(lines: Callable[..., Any]) -> None:
    found = lines(culprit_hosts=(), culprit_ranks=())
    assert (found.culprit_text, found.culprit_lines, found.log_file) == ("", (), "")
    assert texts(found.other_lines) == [LINES[0][3], LINES[1][3], LINES[2][3], LINES[3][3]]


def test_a_host_that_is_blamed_has_the_lines_of_its_ranks(lines: Callable[..., Any]) -> None:
    found = lines(kind=IncidentKind.HOST_LOST, culprit_hosts=("host-1",), culprit_ranks=())
    assert texts(found.culprit_lines) == [LINES[4][3], LINES[2][3], LINES[3][3]]
    assert texts(found.other_lines) == [LINES[0][3], LINES[1][3]]


def test_open_incident_shows_current_lines(lines: Callable[..., Any]) -> None:
    found = lines(state=IncidentState.OPEN, moments=OPEN)
    assert texts(found.culprit_lines)[-1] == LINES[5][3]


def test_lost_launch_shows_lines_before_its_last_sign_of_life(lines: Callable[..., Any]) -> None:
    moments = Moments(BEGAN_S - 4, BEGAN_S + 3000, BEGAN_S + 3001, BEGAN_S + 3001)
    found = lines(kind=IncidentKind.LAUNCH_LOST, culprit_hosts=(), culprit_ranks=(), failures=(), moments=moments)
    assert texts(found.other_lines) == [LINES[0][3]]
    assert (found.label, found.cause_line) == ("", ""), "no log states why a launcher was killed"


def test_a_culprit_that_logged_nothing_has_no_line_of_others(lines: Callable[..., Any]) -> None:
    found = lines(culprit_ranks=(2,))
    assert (texts(found.culprit_lines), found.cause_line) == ([], "")
    assert LINES[1][3] in texts(found.other_lines)
    assert "no line of the culprit is stored for this incident" in found.problem
    assert "rank-00002.log is not here: it was removed" in found.problem


def test_round_without_lines_names_the_place_of_its_log(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    log = tmp_path / "logs" / "host-2" / "round-000001" / "rank-00003.log"
    log.parent.mkdir(parents=True)
    log.write_text("its log\n")
    places = LogPlaces(StoredEvents(run.events, num_threads=1), run, None, host_of, PATIENT_LIMITS)
    found = incident_logs(make_incident(), places, NOW_S)
    assert found.problem.startswith(f"{run.events}: no line of output was streamed; its log is {log}")
    assert found.log_file == str(log)
    log.unlink()
    assert "is not here" in incident_logs(make_incident(), places, NOW_S).problem


def test_host_in_a_record_is_not_used_as_a_path(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    places = LogPlaces(StoredEvents(run.events, num_threads=1), run, None, lambda rank: "../../etc", PATIENT_LIMITS)
    assert incident_logs(make_incident(), places, NOW_S).log_file == ""


def test_a_damaged_record_is_reported_with_its_reason(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    (run.incidents / "20270115-0001.json").write_bytes(encode(make_incident()))
    for name in (b"20270115-0002.json", b"\xff.json"):  # the second one is not UTF-8
        (run.incidents / os.fsdecode(name)).write_bytes(b'{"schema_version": 1, "incident_id": ')
    with closing(RecordedPage(run)) as page:
        listed = page.ask("incidents")
        damaged = [one["incident_id"] for one in listed["damaged"]]
        assert damaged == ["\\udcff", "20270115-0002"]
        for path in ("", "/story", "/logs"):
            for name in damaged:
                assert "its record is damaged" in page.ask(f"incidents/{quote(name)}{path}", 404)["text"]
            page.ask(f"incidents/20270115-0001{path}")
