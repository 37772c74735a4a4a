"""`megatrain annotate`, the incidents that show its notes, and the record of a changed configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.record import encode
from megatrain.run_files.config_changes import ChangedKey, ConfigChange, append_change, changed_keys, read_changes
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.jobs.notes import log_path, read_notes
from tests.helpers.launched_job import make_incident


@pytest.fixture
def run(tmp_path: Path) -> Path:
    RunDirectory(tmp_path / "run").create()
    return tmp_path / "run"


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["annotate", *arguments]) == code
    reported = capsys.readouterr()
    return reported.out + reported.err


def test_a_note_is_written_and_taken_back(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "at step 1,200" in output_of(capsys, str(run), "--text", "learning rate lowered", "--step", "1200")
    output_of(capsys, str(run), "--text", "a switch was replaced", "--at", "2026-11-23T09:30:00Z")
    reported = json.loads(output_of(capsys, str(run), "--text", "looks well", "--json"))
    assert reported["note"]["text"] == "looks well"
    found = read_notes(RunDirectory(run))
    assert [(one.step, one.at_unix_s) for one in found[:2]] == [(1200, None), (None, 1_795_426_200.0)]
    assert all("@" in one.user for one in found)
    assert "is retracted" in output_of(capsys, str(run), "--text", "it was not", "--retract", found[2].note_id)
    assert read_notes(RunDirectory(run))[2].is_retracted


IMPOSSIBLE = [
    (["--text", "ab"], ExitCode.USAGE, "3 to 500 characters"),
    (["--text", "a note", "--at", "tomorrow"], ExitCode.USAGE, "write one with its zone"),
    (["--text", "a note", "--step", "-1"], ExitCode.USAGE, "at least 0"),
    (["--text", "a note", "--step", "1", "--at", "2026-11-23T09:30:00Z"], ExitCode.USAGE, "not allowed with"),
    (["--text", "why", "--retract", "none"], ExitCode.NOT_FOUND, "no note 'none'"),
]


def test_impossible_annotation_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, text in IMPOSSIBLE:
        try:
            found = main(["annotate", str(run), *arguments])
        except SystemExit as end:  # the parser of the command line
            found = int(end.code or 0)
        assert found == code, arguments
        assert text in capsys.readouterr().err
    assert read_notes(RunDirectory(run)) == ()


def test_a_run_that_is_not_there_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["annotate", str(tmp_path / "none"), "--text", "a note"]) == ExitCode.NOT_FOUND
    assert not (tmp_path / "none").exists()


def test_a_link_in_the_runs_place_is_reported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine\n")
    log_path(run).symlink_to(mine)
    assert "cannot be written" in output_of(capsys, str(run), "--text", "a note", code=ExitCode.DATA)
    assert mine.read_text() == "mine\n"


def test_incidents_show_the_notes_of_their_time(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    incident = make_incident()
    (run / "incidents" / f"{incident.incident_id}.json").write_bytes(encode(incident))
    output_of(capsys, str(run), "--text", "a cable was pulled", "--step", "1234")
    output_of(capsys, str(run), "--text", "long after", "--step", "9999")
    assert main(["incidents", str(run)]) == 0
    listed = capsys.readouterr().out
    assert "notes by people" in listed
    assert "a cable was pulled" in listed
    assert "long after" in listed
    assert main(["incidents", str(run), "--id", "last", "--json"]) == 0
    assert [load["text"] for load in json.loads(capsys.readouterr().out)["notes"]] == ["a cable was pulled"]


def test_changes_of_the_configuration_are_kept_by_key(tmp_path: Path) -> None:
    before = {"optimizer.lr": "0.0003", "train.steps": "100", "data.old": '"a"'}
    after = {"optimizer.lr": "0.001", "train.steps": "100", "data.new": '"b"'}
    keys = changed_keys(before, after)
    assert keys == (
        ChangedKey("data.new", "", '"b"'),
        ChangedKey("data.old", '"a"', ""),
        ChangedKey("optimizer.lr", "0.0003", "0.001"),
    )
    assert changed_keys(after, after) == ()
    (long,) = changed_keys({"a.b": "x" * 300}, {"a.b": "x" * 301})
    assert (long.before, long.after) == ("x" * 300, "x" * 297 + "...")
    path = tmp_path / "changes" / "changes.jsonl"
    path.parent.mkdir()
    first, second = ConfigChange(2, 50, 1000.0, keys), ConfigChange(3, 70, 2000.0, keys[:1])
    append_change(path, first)
    with path.open("ab") as file:
        file.write(b'{"schema_version":1,"round":')
    append_change(path, second)
    assert read_changes(path) == (first, second)
    assert read_changes(tmp_path / "changes" / "none.jsonl") == ()
