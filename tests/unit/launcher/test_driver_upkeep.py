"""A driver decides only on current events, pauses between decisions, and is not delayed by absent storage."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState, Moments
from megatrain.contracts.records.record import decode
from megatrain_launcher.driver import incident_files
from megatrain_launcher.driver.incident_files import IncidentFiles
from megatrain_launcher.driver.term import Pace
from tests.helpers.held_file import held_file
from tests.helpers.waiting import wait_until


def incident(incident_id: str, reason: str = "because") -> Incident:
    return Incident(incident_id, IncidentKind.FAILURE, IncidentState.OPEN, 1, Moments(1.0, 2.0), reason, "restart")


def test_delayed_driver_reads_events_before_it_decides() -> None:
    pace = Pace(100.0)
    assert pace.begin_pass(100.2) == 0.0
    assert pace.may_decide(100.2)
    assert pace.begin_pass(109.0) == pytest.approx(8.8)
    assert not pace.may_decide(109.0)
    assert pace.begin_pass(109.2) == 0.0
    assert not pace.may_decide(109.2)
    assert pace.may_decide(109.5)


def test_pause_is_in_proportion_to_the_decision_time() -> None:
    assert Pace.pause_s(0.0001) == pytest.approx(0.0004)
    assert Pace.pause_s(0.004) == pytest.approx(0.016)
    assert Pace.pause_s(3.0) == 0.1


def test_newest_version_of_an_incident_is_its_file(tmp_path: Path) -> None:
    directory = tmp_path / "incidents"
    with IncidentFiles(directory) as files:
        for reason in ("first", "last"):
            files.write(incident("a", reason))
        files.write(incident("b"))
    assert sorted(path.name for path in directory.iterdir()) == ["a.json", "b.json"]
    assert decode(Incident, (directory / "a.json").read_bytes(), "file") == incident("a", "last")
    assert files.problem == ""


def test_absent_storage_is_reported_and_delays_no_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incident_files, "_SLOW_S", 0.05)
    monkeypatch.setattr(incident_files, "_END_S", 0.05)
    (tmp_path / "a.json").write_text("{}")
    with held_file(tmp_path / "a.json") as held:
        with IncidentFiles(tmp_path) as files:
            files.write(incident("a"))
            held.wait_until_asked_for()
            files.write(incident("b", "first"))
            files.write(incident("b", "last"))
            wait_until(lambda: "its storage does not respond" in files.problem, "the problem")
        assert [path.name for path in tmp_path.iterdir()] == ["a.json"], "left without waiting"
        held.release()
    wait_until(lambda: (tmp_path / "b.json").exists(), "what waited")
    assert decode(Incident, (tmp_path / "b.json").read_bytes(), "file").reason == "last"


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with IncidentFiles(tmp_path / "file") as files:
        files.write(incident("a"))
        wait_until(lambda: bool(files.problem), "the problem")
    assert "incident 'a' cannot be written to" in files.problem
    with IncidentFiles(tmp_path) as files:
        files.write(incident("nul\0"))
        wait_until(lambda: bool(files.problem), "the problem")
        files.write(incident("b"))
        wait_until(lambda: (tmp_path / "b.json").exists(), "the next one")


def test_without_a_directory_nothing_is_written() -> None:
    before = threading.active_count()
    with IncidentFiles(None) as files:
        files.write(incident("a"))
        assert threading.active_count() == before
