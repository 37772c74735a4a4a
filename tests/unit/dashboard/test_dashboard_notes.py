"""Notes through the page: who may write them, from which page, how long and how often; and each is in the audit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.run_files.action_log import ACTIONS_NAME, ActionLog
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.actions.handler import ActionHandler
from megatrain_dashboard.settings import DashboardSettings
from megatrain_job.jobs.notes import MAX_AN_HOUR, Author, NoteWriter, read_notes
from tests.helpers.dashboard_server import (
    OPERATOR_TOKEN,
    VIEWER_TOKEN,
    MadeUpJob,
    Reply,
    Served,
    action,
    bearer,
    served,
    session_headers,
)

JSON = {"Content-Type": "application/json"}
SETTINGS = DashboardSettings(port=0, viewer_token=VIEWER_TOKEN, operator_token=OPERATOR_TOKEN)


class NoBackend:
    """Notes need no request to the driver."""

    def read_snapshot(self) -> Any:
        raise AssertionError("a note needs no etcd")

    carry_out = read_snapshot


@dataclass
class NotesPage:
    run: RunDirectory
    server: Served

    def post(self, path: str, token: str = OPERATOR_TOKEN, headers: dict[str, str] | None = None, **body: Any) -> Reply:
        given = (bearer(token) if token else {}) | JSON | (headers or {})
        return self.server.ask(f"/api/v1/{path}", given, method="POST", body=json.dumps(body).encode())

    def note(self, text: str = "a note", key: str = "key-00000001", token: str = OPERATOR_TOKEN, **more: Any) -> Reply:
        return self.post("notes", token, text=text, idempotency_key=key, **more)

    def texts(self) -> list[tuple[str, bool]]:
        return [(one.text, one.is_retracted) for one in read_notes(self.run)]


@contextmanager
def page_of(directory: Path) -> Iterator[NotesPage]:
    run = RunDirectory(directory)
    handler = ActionHandler(NoBackend(), ActionLog(run.diagnosis / ACTIONS_NAME))
    with served(directory, SETTINGS, handler) as server:
        yield NotesPage(run, server)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[NotesPage]:
    """A page without notes."""
    with page_of(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotesPage]:
    """A page that may have notes of other tests."""
    with page_of(tmp_path_factory.mktemp("notes")) as found:
        yield found


def test_written_and_retracted_note_is_in_the_audit(page: NotesPage) -> None:
    made = page.note("learning rate lowered", step=1200)
    assert (made.status, made.json["step"], made.json["user"]) == (200, 1200, "token-operator")
    made.assert_secured()
    again = page.note("learning rate lowered", step=1200)
    assert again.json["note_id"] == made.json["note_id"], "sent twice, written once"
    name = made.json["note_id"]
    gone = page.post(f"notes/{name}/retraction", reason="it was raised", idempotency_key="key-00000002")
    assert (gone.status, gone.json["retracted_by"], gone.json["retraction"]) == (200, "token-operator", "it was raised")
    assert page.texts() == [("learning rate lowered", True)]
    reported = page.server.ask("/api/v1/audit", bearer(VIEWER_TOKEN)).json
    assert reported["chain_problem"] == ""
    assert sorted((one["source"], one["action"], one["reason"]) for one in reported["entries"]) == [
        ("dashboard", "note", "learning rate lowered"),
        ("dashboard", "retract-note", "it was raised"),
    ]
    page.post(f"notes/{name}/retraction", reason="again", idempotency_key="key-00000003").assert_refused(
        409, "retracted already"
    )
    page.post("notes/none/retraction", reason="again", idempotency_key="key-00000004").assert_refused(404, "no note")
    # a note of the command line
    NoteWriter(ActionLog(page.run.diagnosis / ACTIONS_NAME)).add("from a terminal", Author("me@login", "operator"))
    entries = page.server.ask("/api/v1/audit", bearer(VIEWER_TOKEN)).json["entries"]
    assert [entry["actor"] for entry in entries if entry["source"] == "command line"] == ["me@login"]


def test_note_without_permission_or_from_elsewhere_is_refused(shared: NotesPage) -> None:
    before = shared.texts()
    for token, headers, status, text in (
        (VIEWER_TOKEN, {}, 403, "viewers may only read"),
        ("", {}, 401, "not logged in"),
        ("some-unknown-token-00", {}, 401, "not a token"),
        (OPERATOR_TOKEN, {"Content-Type": "text/plain"}, 400, ""),
        (OPERATOR_TOKEN, {"Host": "evil.example"}, 403, "not a name of this dashboard"),
    ):
        reply = shared.post("notes", token, headers, text="a note", idempotency_key="key-00000001")
        reply.assert_refused(status, text, where=(token, headers))
    assert shared.texts() == before


def test_another_page_writes_nothing_with_a_browsers_session(shared: NotesPage) -> None:
    before = shared.texts()
    server = shared.server
    own = server.from_page()
    session = session_headers(server.log_in(OPERATOR_TOKEN))
    note = json.dumps({"text": "not mine", "idempotency_key": "key-of-a-page"}).encode()
    for foreign in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"X-Megatrain-Request": ""}):
        server.ask("/api/v1/notes", {**own, **session, **foreign}, method="POST", body=note).assert_refused(403)
    assert shared.texts() == before
    assert server.ask("/api/v1/notes", {**own, **session}, method="POST", body=note).status == 200


MALFORMED: list[tuple[dict[str, Any], int, str]] = [
    ({"text": "x" * 501}, 400, "text"),
    ({"text": "xx"}, 400, "text"),
    ({"text": "two\nlines"}, 400, "one line of text"),
    ({"text": "turned \u202e text"}, 400, "control characters"),
    ({"step": -1}, 400, "step"),
    ({"step": 1, "at_unix_s": 1.0}, 400, "give one of them"),
    ({"at_unix_s": 1e12}, 400, "at_unix_s"),
    ({"idempotency_key": "short"}, 400, "idempotency_key"),
    ({"color": "red"}, 400, "color"),
    ({"text": "x" * 20_000}, 413, ""),
]


def test_malformed_note_is_refused_with_the_reason(shared: NotesPage) -> None:
    before = shared.texts()
    for body, status, text in MALFORMED:
        reply = shared.post("notes", **{"text": "a note", "idempotency_key": "key-00000001", **body})
        reply.assert_refused(status, text, where=body)
    assert shared.texts() == before


def test_notes_through_the_page_are_limited_to_sixty_an_hour(page: NotesPage) -> None:
    writer = NoteWriter(ActionLog(page.run.diagnosis / ACTIONS_NAME))
    for number in range(MAX_AN_HOUR):
        writer.add(f"note {number}", Author("loop", "operator"))
    refused = page.note("one too many")
    refused.assert_refused(429, "60 notes and retractions within the last hour")
    assert 0 < int(refused.headers["retry-after"]) <= 3601
    assert len(page.texts()) == MAX_AN_HOUR


def test_markup_in_a_note_stays_text(shared: NotesPage) -> None:
    made = shared.note("<img src=x onerror=alert(1)>", "key-of-markup")
    assert made.json["text"] == "<img src=x onerror=alert(1)>"
    assert made.headers["content-type"] == "application/json"


def test_recorded_run_accepts_no_note_and_no_action(tmp_path: Path) -> None:
    recorded = MadeUpJob(RunDirectory(tmp_path), is_recorded=True)
    with served(tmp_path, replace(SETTINGS, enable_actions=True), source=recorded) as server:
        NotesPage(recorded.run, server).note().assert_refused(403, "history of a run")
        headers = bearer(OPERATOR_TOKEN) | JSON
        server.ask("/api/v1/actions", headers, method="POST", body=action()).assert_refused(403, "recorded run")
    assert not (tmp_path / "diagnosis").exists()
