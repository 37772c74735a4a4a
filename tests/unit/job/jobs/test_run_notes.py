"""Notes on a run: written once, by several writers concurrently, past torn lines and foreign files, and retracted
once."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.errors import MegatrainError, NotFoundError, UsageError
from megatrain.contracts.files.file_locks import is_locked
from megatrain.contracts.records.incident import IncidentState
from megatrain.run_files.action_log import ActionEntry, ActionLog, ActionTrail, read_actions
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.jobs import notes
from megatrain_job.jobs.notes import MAX_AN_HOUR, Author, NoteRefusedError, NoteWriter, log_path, notes_of, read_notes
from tests.helpers.launched_job import NOW_S, make_incident
from tests.helpers.refusals import refusal
from tests.helpers.waiting import DEADLINE_S

ADA = Author("ada", "operator", "10.0.0.7")
BOB = Author("bob@login", "operator")


class Writer(NoteWriter):
    """A writer with a clock that a test moves."""

    def __init__(self, run: Path) -> None:
        self.now_s = NOW_S
        super().__init__(ActionLog(log_path(run)), clock=lambda: self.now_s)


@pytest.fixture
def notes_writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path)


def reported(run: Path) -> list[tuple[str, str, int | None, float | None, bool]]:
    return [
        (note.user, note.text, note.step, note.at_unix_s, note.is_retracted) for note in read_notes(RunDirectory(run))
    ]


def test_note_has_a_step_or_a_time(notes_writer: Writer, tmp_path: Path) -> None:
    assert reported(tmp_path) == []
    notes_writer.add(" learning rate lowered ", ADA, step=1200)
    notes_writer.add("switch 4 was replaced", BOB, at_unix_s=NOW_S - 60)
    notes_writer.add('looks "well" </script> \\', ADA)
    assert reported(tmp_path) == [
        ("ada", "learning rate lowered", 1200, None, False),
        ("bob@login", "switch 4 was replaced", None, NOW_S - 60, False),
        ("ada", 'looks "well" </script> \\', None, NOW_S, False),
    ]
    trail = read_actions(log_path(tmp_path))
    assert trail.problem == ""
    assert [(entry.kind, entry.user, entry.role, entry.address) for entry in trail.entries[:2]] == [
        ("note", "ada", "operator", "10.0.0.7"),
        ("note", "bob@login", "operator", ""),
    ]


def test_a_note_is_retracted_once_and_nothing_is_removed(notes_writer: Writer, tmp_path: Path) -> None:
    kept, wrong = notes_writer.add("stays", ADA), notes_writer.add("wrong host", ADA)
    before = log_path(tmp_path).read_bytes()
    found = notes_writer.retract(wrong.note_id, "it was host-4", BOB)
    assert (found.is_retracted, found.retracted_by, found.retraction) == (True, "bob@login", "it was host-4")
    assert [note.is_retracted for note in read_notes(RunDirectory(tmp_path))] == [False, True]
    assert log_path(tmp_path).read_bytes().startswith(before)
    with pytest.raises(NoteRefusedError, match="retracted already, by bob@login: it was host-4"):
        notes_writer.retract(wrong.note_id, "again", ADA)
    before = log_path(tmp_path).read_bytes()
    with pytest.raises(NotFoundError, match="no note 'none'"):
        notes_writer.retract("none", "not there", ADA)
    assert log_path(tmp_path).read_bytes() == before
    assert kept.note_id in {note.note_id for note in read_notes(RunDirectory(tmp_path)) if not note.is_retracted}


MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    ("", {}, "has 3 to 500 characters; this one has 0"),
    (" \u200b\u200b\u200b\u200b ", {}, "3 to 500 characters"),
    ("x" * 501, {}, "this one has 501"),
    ("two\nlines", {}, "one line of text without control characters"),
    ("red \x1b[31m", {}, "control characters"),
    ("turned \u202e text", {}, "control characters"),
    ("both places", {"step": 1, "at_unix_s": 2.0}, "give one of them"),
    ("no such step", {"step": -1}, "step -1 does not exist"),
    ("no such step", {"step": 2**31}, "does not exist; steps go from 0"),
    ("before time", {"at_unix_s": -1.0}, "not a time of a run"),
    ("no number", {"at_unix_s": float("nan")}, "not a time of a run"),
]
"""Text, place, and the reason for the refusal."""


def test_malformed_note_is_refused_and_leaves_nothing(notes_writer: Writer, tmp_path: Path) -> None:
    for text, place, problem in MALFORMED:
        assert problem in refusal(UsageError, notes_writer.add, text, ADA, **place), (text, place)
    assert not log_path(tmp_path).exists()


def test_note_sent_twice_under_one_key_is_written_once(notes_writer: Writer, tmp_path: Path) -> None:
    first = notes_writer.add("once", ADA, step=7, key="key-00000001")
    notes_writer.now_s += 60
    assert notes_writer.add("once", ADA, step=7, key="key-00000001") == first
    assert len(reported(tmp_path)) == 1
    for text, author in (("another", ADA), ("once", BOB)):
        with pytest.raises(NoteRefusedError, match="was used for another request"):
            notes_writer.add(text, author, key="key-00000001")


def test_key_of_one_retraction_is_refused_for_another_note(notes_writer: Writer, tmp_path: Path) -> None:
    first, second = notes_writer.add("the first", ADA), notes_writer.add("the second", ADA)
    retracted = notes_writer.retract(first.note_id, "wrong", ADA, key="key-00000001")
    assert notes_writer.retract(first.note_id, "wrong", ADA, key="key-00000001") == retracted
    for note_id in (second.note_id, "none"):
        with pytest.raises(NoteRefusedError, match="was used for another request"):
            notes_writer.retract(note_id, "wrong", ADA, key="key-00000001")
    assert [note.is_retracted for note in read_notes(RunDirectory(tmp_path))] == [True, False]


def test_notes_beyond_sixty_an_hour_are_refused(notes_writer: Writer) -> None:
    for number in range(MAX_AN_HOUR):
        notes_writer.add(f"note {number}", ADA)
        notes_writer.now_s += 10
    with pytest.raises(NoteRefusedError, match="60 notes and retractions within the last hour") as refused:
        notes_writer.add("one too many", BOB)
    assert refused.value.wait_s == pytest.approx(3600 - 600)
    notes_writer.now_s += 3000.1
    notes_writer.add("an hour after the first", BOB)


def test_number_of_notes_of_a_run_is_limited(notes_writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "MAX_NOTES", 2)
    one = notes_writer.add("the first", ADA)
    notes_writer.add("the second", ADA)
    notes_writer.retract(one.note_id, "it counts all the same", ADA)
    with pytest.raises(NoteRefusedError, match="has 2 notes, and no more are accepted"):
        notes_writer.add("the third", ADA)


def test_note_after_a_truncated_line_is_kept(notes_writer: Writer, tmp_path: Path) -> None:
    notes_writer.add("before", ADA)
    with log_path(tmp_path).open("ab") as file:
        file.write(b'{"schema_version":1,"at_unix_s":1.0,"stage":"res')
    notes_writer.add("after", ADA)
    assert [text for _, text, *_ in reported(tmp_path)] == ["before", "after"]
    assert read_actions(log_path(tmp_path)).problem.endswith(":2 is damaged")  # reported, but not repaired


def _write_some(run: str, name: str, barrier: Any) -> None:
    own = NoteWriter(ActionLog(log_path(Path(run))))
    barrier.wait()
    for number in range(10):
        own.add(f"{name} {number}", Author(name, "operator"))


def test_writers_of_several_processes_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    writers = [context.Process(target=_write_some, args=(str(tmp_path), f"w{number}", barrier)) for number in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    assert {note.text for note in read_notes(RunDirectory(tmp_path))} == {
        f"w{w} {n}" for w in range(4) for n in range(10)
    }
    assert read_actions(log_path(tmp_path)).problem == ""


def test_a_line_is_written_under_the_lock_of_the_file(tmp_path: Path) -> None:
    path, found = tmp_path / "actions.jsonl", list[bool | None]()

    def check(_: ActionTrail) -> None:
        with path.open("rb") as other:
            found.append(is_locked(other.fileno()))

    ActionLog(path).append(ActionEntry(NOW_S, "intent", "1", "", "ada", "operator", "", "stop", "", ""), check)
    assert found == [True]


class HeldLog(ActionLog):
    """Waits before it takes the file's lock, until the test lets it continue."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.arrived, self.go_on = threading.Event(), threading.Event()

    def append(self, entry: Any, check: Callable[[ActionTrail], None] = lambda _: None) -> Any:
        self.arrived.set()
        assert self.go_on.wait(DEADLINE_S)
        return super().append(entry, check)


def test_second_concurrent_retraction_fails(notes_writer: Writer, tmp_path: Path) -> None:
    wrong = notes_writer.add("wrong", ADA)
    held = HeldLog(log_path(tmp_path))
    refused: list[MegatrainError] = []

    def late() -> None:
        try:
            NoteWriter(held, clock=lambda: NOW_S).retract(wrong.note_id, "late", BOB)
        except MegatrainError as error:
            refused.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    assert held.arrived.wait(DEADLINE_S)  # The note existed when the late writer arrived.
    notes_writer.retract(wrong.note_id, "first", ADA)
    held.go_on.set()
    thread.join()
    assert "retracted already, by ada: first" in str(refused[0])
    assert [note.retraction for note in read_notes(RunDirectory(tmp_path))] == ["first"]


@pytest.mark.parametrize("what", ["link", "directory-link", "fifo"])
def test_notes_of_a_foreign_run_touch_no_own_file(what: str, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "actions.jsonl").write_text("mine\n")
    run = tmp_path / "run"
    run.mkdir()
    if what == "directory-link":
        (run / "diagnosis").symlink_to(own)
    else:
        (run / "diagnosis").mkdir()
        path = log_path(run)
        path.symlink_to(own / "actions.jsonl") if what == "link" else os.mkfifo(path)
    with pytest.raises(OSError, match=r"symbolic link|regular file|Not a directory|No such device"):
        NoteWriter(ActionLog(log_path(run))).add("not there", ADA)
    assert (own / "actions.jsonl").read_text() == "mine\n"


def test_foreign_file_is_no_note(notes_writer: Writer, tmp_path: Path) -> None:
    notes_writer.add("a note", ADA, step=3)
    (entry,) = read_actions(log_path(tmp_path)).entries
    made_up = [
        replace(entry, action_id="a", target="step 99999999999"),
        replace(entry, action_id="b", target="nowhere"),
        replace(entry, action_id="c", reason="x" * 501),
        replace(entry, action_id="d", kind="retract-note", target="none"),
        replace(entry, action_id="e", user="\x1b[31mred", reason="\x1b]0;title\x07"),
    ]
    found = notes_of([entry, *made_up])
    assert [one.note_id for one in found] == [entry.action_id, "e"]
    assert "\x1b" not in found[1].user + found[1].text


def test_note_belongs_to_the_incident_of_its_time(notes_writer: Writer) -> None:
    incident = make_incident()  # began 703 s ago, was over 3 s later; from step 1234 back to 1230
    ended = incident.moments.first_step or 0.0
    cases = [
        ({"at_unix_s": incident.moments.began - 299}, True),
        ({"at_unix_s": incident.moments.began - 301}, False),
        ({"at_unix_s": ended + 299}, True),
        ({"at_unix_s": ended + 301}, False),
        ({"step": 1229}, False),
        ({"step": 1230}, True),
        ({"step": 1234}, True),
        ({"step": 1235}, False),
    ]
    for place, is_of in cases:
        assert notes_writer.add("a note", ADA, **place).is_of(incident, NOW_S) is is_of, place
    lasting = replace(incident, state=IncidentState.OPEN)
    assert notes_writer.add("still open", ADA, at_unix_s=NOW_S).is_of(lasting, NOW_S)
