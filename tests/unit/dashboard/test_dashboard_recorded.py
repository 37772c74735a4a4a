"""The JSON views of a recorded run over HTTP, compared with its source data and the output of the commands."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Hashable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint_format.checkpoint_files import pin
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.url_location import open_location
from megatrain.checkpoint_format.verifications import Verification, record_verifications
from megatrain.cli import main
from megatrain.contracts.records.host_verdict import AuditEntry, OutcomeKind, VerdictOutcome
from megatrain.run_files.action_log import ACTIONS_NAME, ActionLog
from megatrain.run_files.config_changes import CHANGES_NAME, ChangedKey, ConfigChange, append_change
from megatrain.run_files.incidents import AUDIT_NAME, append_to_audit
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.api.checkpoints import checkpoints_document
from megatrain_dashboard.api.stragglers.route import remedy_cost_of
from megatrain_dashboard.responses.cache import CachedResponse, ResponseCache
from megatrain_dashboard.sources import checkpoint_watch
from megatrain_dashboard.sources.checkpoint_watch import CheckpointWatch, read_checkpoints
from megatrain_diagnostics.store.daemon_state import write_state
from megatrain_job.jobs.notes import Author, NoteWriter
from tests.helpers.recorded_run import (
    END_TOKENS,
    FAILED_S,
    NAN_STEP,
    SCRIPT,
    SPIKE_STEP,
    START_S,
    end_s,
    write_recorded_run,
)
from tests.helpers.served_run import NOW_S, RecordedPage
from tests.helpers.waiting import wait_until
from tests.helpers.written_verdicts import STRAGGLER
from tests.unit.dashboard.test_daemon_state import FINDING, STATE


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recorded_run(tmp_path_factory.mktemp("recorded") / "run").run.root


@pytest.fixture(scope="module")
def page(made: Path) -> Iterator[RecordedPage]:
    with closing(RecordedPage(RunDirectory(made))) as found:
        yield found


@pytest.fixture
def own_run(made: Path, tmp_path: Path) -> RunDirectory:
    """A copy that a test may change."""
    shutil.copytree(made, tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def test_overview_of_a_recorded_run_has_its_last_figures(page: RecordedPage) -> None:
    found = page.ask("overview")
    assert (found["at_unix_s"], found["state"], found["level"]) == (NOW_S, "unreachable", "red")
    assert (found["step"], found["train_steps"], found["round"]) == (120, 240, 2)
    assert found["tokens"] == END_TOKENS
    assert (found["step_s"], found["tokens_per_s"], found["mfu"]) == (1.0, 4096.0, pytest.approx(0.4))
    assert found["loss"] == pytest.approx(5.0 - 1.19)
    assert found["last_step_unix_s"] == end_s(2, 119)
    # from the last step that counts to the first step that was completed afterwards
    lost_s = end_s(2, 50) - end_s(1, 49)
    assert found["effective_time_ratio"] == pytest.approx(1 - lost_s / (end_s(2, 119) - START_S))
    assert found["checkpoint"]["step"] == 100
    assert found["hosts"]["total"] == 2
    assert found["next_action"]["what"] == "nothing"
    assert found["remaining_s"] is None
    assert any("torn.json" in problem for problem in found["diagnosis"]["problems"])


@pytest.mark.slow(kept=["0-finished-green"])
@pytest.mark.parametrize(
    ("code", "state", "level"),
    [("0", "finished", "green"), ("75", "saved and stopped", "green"), ("70", "failed", "red")],
)
def test_a_run_is_as_its_launch_left_it(own_run: RunDirectory, code: str, state: str, level: str) -> None:
    (own_run.root / "coordination").mkdir()
    (own_run.root / "coordination" / "exit-code").write_text(f"{code}\n")
    page = RecordedPage(own_run)
    found = page.ask("overview")
    page.close()
    assert (found["state"], found["level"]) == (state, level)
    assert f"exit code {code}" in found["headline"]


def test_steps_are_reported_once_by_the_round_that_did_them_last(page: RecordedPage) -> None:
    found = page.ask("series")
    assert found["step"] == list(range(120))
    assert found["round"] == [1] * 50 + [2] * 70
    assert found["at_unix_s"][49:51] == [end_s(1, 49), end_s(2, 50)]
    assert found["bad_steps"] == [NAN_STEP]
    assert found["loss"][NAN_STEP] is None
    few = page.ask("series?points=10")
    assert len(few["step"]) == 10
    assert max(few["loss_high"]) == 100.0
    assert few["loss"][SPIKE_STEP * 10 // 120] != 100.0
    assert page.ask("series?round=1")["step"] == list(range(50))
    assert page.ask("series?from=100&to=102")["step"] == [100, 101, 102]
    assert "there are 1, 2" in page.ask("series?round=3", 404)["text"]
    assert page.ask("series?from=5&to=4", 400)["text"] == "from='5', to='4': the range ends before it begins"
    assert page.ask("series?points=1", 400)["error"] == "bad-request"


def test_an_incident_has_its_phases_its_root_cause_and_its_cost(page: RecordedPage) -> None:
    (found,) = page.ask("incidents")["incidents"]
    assert found == page.ask(f"incidents/{found['incident_id']}")
    assert [(one["rank"], one["host"], one["is_cascade"]) for one in found["failures"]] == [
        (3, "host-1", False),
        (1, "host-0", True),
    ]
    assert [one["name"] for one in found["phases"]] == ["detect", "decide", "stop", "rendezvous", "load", "first_step"]
    assert [one["seconds"] for one in found["phases"]] == [1.0, 0.5, 1.5, 7.0, 10.0, 10.5]
    assert found["phases"][3]["began_unix_s"] == FAILED_S + 3
    assert (found["steps_lost"], found["down_s"]) == (10, 30.5)
    assert found["incident_id"] in page.ask("incidents/none", 404)["text"]


@pytest.fixture(scope="module")
def annotated(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedPage]:
    """The run with verdicts, a note, a changed key, a state of the daemon, verifications of checkpoints, and a pin."""
    run = RunDirectory(tmp_path_factory.mktemp("annotated") / "run")
    shutil.copytree(made, run.root)
    waiting = VerdictOutcome("v-1", OutcomeKind.WAITING, "waits for a person", "host-1", 10.0, gain_s=5.0, cost_s=2.0)
    declined = VerdictOutcome("v-1", OutcomeKind.DECLINED, "by a person", "host-1", 20.0, by="me@here")
    for outcome in (waiting, declined):
        append_to_audit(run.incidents / AUDIT_NAME, AuditEntry(outcome, STRAGGLER))
    write_state(run.diagnosis, replace(STATE, round=2, findings=(replace(FINDING, ranks=(3,)),)))
    record_verifications(
        LocalLocation(run.checkpoints),
        [Verification.of("main", 50, 1_790_000_100.0, []), Verification.of("main", 100, 1.0, ["older than it"])],
    )
    NoteWriter(ActionLog(run.diagnosis / ACTIONS_NAME)).add("a switch was replaced", Author("me", "operator"), step=60)
    append_change(
        run.diagnosis / CHANGES_NAME, ConfigChange(2, 51, 1_790_000_000.0, (ChangedKey("optimizer.lr", "1", "2"),))
    )
    (run.checkpoints / "main" / "step-000000110").mkdir()
    # a character that JSON can represent and UTF-8 cannot
    pinned = '{"schema_version": 1, "reason": "\\ud800 kept", "pinned_unix_s": 1.0}'
    (run.checkpoints / "main" / "step-000000100" / "PINNED").write_text(pinned)
    with closing(RecordedPage(run)) as found:
        yield found


def test_verdicts_come_from_the_audit(annotated: RecordedPage) -> None:
    (found,) = annotated.ask("incidents")["verdicts"]
    assert found == annotated.ask("verdicts/v-1")
    annotated.ask("verdicts/v-2", 404)
    assert (found["hosts"], found["outcome"], found["outcome_by"]) == (["host-2"], "declined", "me@here")
    assert (found["evidence"], found["gain_s_per_step"]) == (["its forward takes 1.3 x its peers'"], 0.03)


def test_notes_and_changed_keys_come_from_the_run_directory(annotated: RecordedPage) -> None:
    assert [(one["step"], one["text"]) for one in annotated.ask("notes")["notes"]] == [(60, "a switch was replaced")]
    marks = [mark for mark in annotated.ask("marks")["marks"] if mark["kind"] == "config"]
    assert [(mark["step"], "optimizer.lr" in mark["text"]) for mark in marks] == [(51, True)]


def test_hosts_of_a_recorded_run_are_those_of_its_ranks(page: RecordedPage) -> None:
    found = page.ask("hosts")["hosts"]
    assert [(one["host"], one["first_rank"], one["num_workers"]) for one in found] == [
        ("host-0", 0, 2),
        ("host-1", 2, 2),
    ]
    assert [(one["clock_offset_s"], one["clock_error_s"]) for one in found] == [(0.007, 2e-6), (-0.002, 3e-6)]
    history = page.ask("hosts/host-1")
    assert (history["rounds"], len(history["incident_ids"])) == ([1, 2], 1)
    assert "host-0 and host-1" in page.ask("hosts/host-7", 404)["text"]


def test_checkpoints_have_a_state_and_a_verification(annotated: RecordedPage) -> None:
    found = {one["step"]: one for one in annotated.ask("checkpoints")["checkpoints"]}
    assert (found[50]["verify_result"], found[50]["verified_unix_s"]) == ("whole", 1_790_000_100.0)
    assert (found[100]["verify_result"], found[100]["verified_unix_s"]) == ("", None)
    assert found[110]["state"] == "unfinished"
    assert (found[100]["state"], found[100]["is_in_line"]) == ("pinned", True)
    assert found[100]["pin_reason"] == "\\ud800 kept"


def test_damaged_files_are_reported_in_every_view(own_run: RunDirectory) -> None:
    later_s = 4_000_000_000.0
    record_verifications(
        LocalLocation(own_run.checkpoints),
        [Verification.of("main", 100, later_s, ["r000001-rank-00000.distcp: 16 bytes are missing"])],
    )
    (own_run.incidents / os.fsdecode(b"\xff.json")).write_bytes(b"torn")  # a name that is not UTF-8
    (own_run.root / "config.toml").write_text("[job\n")
    page = RecordedPage(own_run)
    found = {one["step"]: one for one in page.ask("checkpoints")["checkpoints"]}
    overview = page.ask("overview")
    page.close()
    assert (found[50]["state"], found[100]["state"]) == ("committed", "damaged")
    assert overview["checkpoint"]["step"] == 50, "a job that lost all others would resume from it"
    for text in ("udcff.json", "config.toml is damaged"):
        assert any(text in problem for problem in overview["diagnosis"]["problems"]), text


def test_lines_are_found_whatever_their_case_and_stay_text(page: RecordedPage) -> None:
    found = page.ask("logs?query=error&round=1")
    assert [(one["rank"], one["host"]) for one in found["lines"]] == [(3, "host-1"), (1, "host-0")]
    assert (found["num_matching"], found["num_searched"], found["is_partial"]) == (2, 3, False)
    (line,) = page.ask("logs?query=%3Cscript%3E")["lines"]
    assert line["line"].startswith(SCRIPT)
    for ranks in ("0:1", "0-1"):
        assert page.ask(f"logs?ranks={ranks}&round=1")["num_matching"] == 2
    assert page.ask("logs?hosts=host-1&round=1")["num_matching"] == 1
    newest = page.ask("logs?round=1&limit=1")
    assert [one["rank"] for one in newest["lines"]] == [1]
    assert newest["num_matching"] == 3
    assert "the rounds with lines are 1, 2" in page.ask("logs?round=8", 404)["text"]
    assert page.ask("logs?ranks=5:2", 400)["text"].startswith("ranks=")


def test_pathological_expression_is_answered_at_once(page: RecordedPage) -> None:
    found = page.ask("logs?is_regex=true&query=(a%2B)%2B%24")
    assert (found["num_matching"], found["num_searched"]) == (0, 3)
    assert page.ask("logs?is_regex=true&query=(a%2B)%2B!%24")["num_matching"] == 1
    assert page.ask("logs?is_regex=true&query=(", 400)["text"].startswith("query=")
    assert "not a valid regular expression" in page.ask("logs?is_regex=true&query=(%3F%3Da)b", 400)["text"]


def test_cause_of_a_failure_comes_before_what_followed(page: RecordedPage, capsys: pytest.CaptureFixture[str]) -> None:
    found = page.ask("logs/causes?round=1")
    assert [(one["rank"], one["role"]) for one in found["causes"]] == [(3, "root"), (1, "follows")]
    assert main(["logs", "classify", str(page.run.root), "--round", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    expected = (printed["label"], printed["root_rank"], printed["reason"])
    assert (found["label"], found["root_rank"], found["reason"]) == expected


def test_stragglers_equal_those_of_the_command(page: RecordedPage, capsys: pytest.CaptureFixture[str]) -> None:
    found = page.ask("stragglers")
    assert main(["diag", "stragglers", str(page.run.root), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (found["source"], found["round"], found["is_enough"]) == ("events", 2, printed["is_enough"])
    same = ("cause", "confidence", "hosts", "ranks", "first_step", "last_step", "gain_s", "evidence", "is_over")
    assert [{key: one[key] for key in same} for one in found["findings"]] == [
        {key: one[key] for key in same} for one in printed["findings"]
    ]
    assert found["findings"][0]["hosts"] == ["host-1"]
    assert {one["host"]: one["score"] for one in found["scores"]} == printed["host_scores"]
    assert found["scores"][0] == {"host": "host-1", "score": found["findings"][0]["score"]}
    assert found["thresholds"] == printed["thresholds"]
    assert found["scores"][0]["score"] >= found["thresholds"]["score"]


def test_a_rank_has_its_place_its_peers_and_its_stacks(page: RecordedPage) -> None:
    found = page.ask("ranks/3")
    assert (found["host"], found["place"]["dp"], found["pid"], found["step"]) == ("host-1", 3, 1003, 119)
    assert found["groups"] == [{"name": "dp", "first_rank": 0, "num_ranks": 4, "stride": 1}]
    (stack,) = found["stacks"]
    assert stack["frames"][-1] == "megatrain/data/loader.py:7 read"
    assert "ranks 0 to 3" in page.ask("ranks/4", 404)["text"]
    assert page.ask("ranks/0?round=1")["round"] == 1
    page.ask("ranks/x", 400)


def test_whatif_without_a_full_step_is_an_error(page: RecordedPage) -> None:
    assert "no step was recorded in full" in page.ask("whatif", 404)["text"]


def test_last_state_of_the_daemon_is_shown(annotated: RecordedPage) -> None:
    rank = annotated.ask("ranks/1")
    silent = annotated.ask("overview")["diagnosis"]
    slow = annotated.ask("ranks/3")
    assert rank["score"] == 8.0
    assert (slow["findings"], rank["findings"]) == (["it is slow"], [])
    assert (silent["silent_ranks"], silent["rows_dropped"], silent["rows_refused"]) == ([4, 5, 6], 1, 2)


def test_empty_directory_is_shown_without_figures(tmp_path: Path) -> None:
    page = RecordedPage(RunDirectory(tmp_path))
    found = page.ask("overview")
    assert (found["step"], found["num_incidents"], found["effective_time_ratio"]) == (None, 0, None)
    assert page.ask("series")["step"] == []
    assert page.ask("hosts")["hosts"] == []
    assert page.ask("incidents") == {"incidents": [], "verdicts": [], "damaged": []}
    for path in ("stragglers", "whatif", "hang", "ranks/0", "logs", "logs/causes"):
        assert page.ask(path, 404)["error"] == "not-found"
    page.close()


def test_restart_cost_and_gain_of_remaining_steps(page: RecordedPage) -> None:
    remedy_cost = remedy_cost_of(page.source, NOW_S, 2)
    assert (remedy_cost.remaining_steps, remedy_cost.cost_text) == (120, "measured")
    assert remedy_cost.cost_s == pytest.approx(30.5 + 10)


def test_uncommitted_checkpoint_is_damaged_unless_being_written(own_run: RunDirectory) -> None:
    (own_run.checkpoints / "main" / "step-000000050" / "COMMIT").unlink()
    document = checkpoints_document(read_checkpoints(str(own_run.checkpoints)))
    states = {checkpoint.step: (checkpoint.state, checkpoint.problem[:9]) for checkpoint in document.checkpoints}
    assert states == {50: ("damaged", "it has no"), 100: ("committed", "")}


def test_pin_appears_at_the_next_poll(own_run: RunDirectory) -> None:
    watch = CheckpointWatch(lambda: str(own_run.checkpoints), lambda: None, period_s=0.05)

    def reasons() -> dict[int, str | None]:
        survey = watch.seen.survey
        return {} if survey is None else {checkpoint.step: checkpoint.pin_reason for checkpoint in survey.checkpoints}

    with closing(watch):
        wait_until(lambda: bool(reasons()), "the first poll")
        assert reasons() == {50: None, 100: None}
        pin(LocalLocation(own_run.checkpoints / "main" / "step-000000050"), "a release")
        wait_until(lambda: any(reasons().values()), "the pin")
        assert reasons() == {50: "a release", 100: None}


def test_checkpoints_that_cannot_be_listed_give_the_reason(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "BRANCH").write_text("torn")
    seen = read_checkpoints(str(tmp_path))
    assert seen.survey is None
    assert "BRANCH" in checkpoints_document(seen).resume_reason
    assert read_checkpoints("s3://user:secret@bucket/x").survey is None


@pytest.mark.slow(kept=["{outside}"])
@pytest.mark.parametrize("place", ["memory://elsewhere/checkpoints", "{outside}"])
def test_history_reads_nothing_outside_its_directory(
    own_run: RunDirectory, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(own_run.checkpoints, outside)
    text = (own_run.root / "config.toml").read_text()
    named = place.format(outside=outside)
    (own_run.root / "config.toml").write_text(f"{text}\n[checkpoint]\ndirectory = {named!r}\n")
    asked: list[str] = []

    def noted(text: str) -> object:
        asked.append(text)
        return open_location(text)

    monkeypatch.setattr(checkpoint_watch, "open_location", noted)
    page = RecordedPage(own_run)
    assert page.ask("checkpoints")["checkpoints"]
    assert set(asked) == {str(own_run.checkpoints)}
    assert any("is outside of the run directory" in problem for problem in page.source.facts().problems)
    page.close()


def test_pipe_in_place_of_a_file_does_not_block(own_run: RunDirectory) -> None:
    for name in ("config.toml", "diagnosis/state.json", "incidents/audit.jsonl", "exit-code"):
        path = own_run.root / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    page = RecordedPage(own_run)
    assert page.ask("overview")["round"] == 2
    page.close()


def test_key_of_a_cached_response_is_small(page: RecordedPage, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[object] = []
    get = ResponseCache.get

    def noted(self: ResponseCache, key: Hashable, *arguments: Any, **more: Any) -> CachedResponse:
        keys.append(key)
        return get(self, key, *arguments, **more)

    monkeypatch.setattr(ResponseCache, "get", noted)
    assert page.ask("logs?ranks=0:999998&round=1")["num_searched"] == 3
    assert len(repr(keys)) < 1000
