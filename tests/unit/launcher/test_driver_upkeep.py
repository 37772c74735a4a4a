"""What a driver writes beside its decisions: the files of incidents, receipts, its log; and its pauses."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState, Moments
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.notices import Receipt, ReceiverRecord
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import Halt
from megatrain_launcher.driver import incident_files
from megatrain_launcher.driver.actions import Decision, DriverAction, HaltRound, UpdateIncident
from megatrain_launcher.driver.decision_log import DecisionLog
from megatrain_launcher.driver.incident_files import IncidentFiles
from megatrain_launcher.driver.incidents import kept_receipts
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.driver.term import Pace
from tests.helpers.held_file import held_file
from tests.helpers.launched_job import NOW_S, make_incident
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


def state_of(incident: Incident, *records: ReceiverRecord) -> ClusterState:
    incidents = {incident.incident_id: incident}
    return ClusterState(JobKeys("demo"), "host-1", NOW_S, incidents=incidents,
                        receivers={one.receiver: one for one in records})  # fmt: skip


def record(receiver: str, *receipts: Receipt, topic: str | None = None) -> ReceiverRecord:
    return ReceiverRecord(receiver, receipts={topic or make_incident().topic: receipts})


OPENED = Receipt("slack", "open", NOW_S)
CLOSED = Receipt("slack", "closed", NOW_S + 5)
PAGED = Receipt("pagerduty", "open", NOW_S + 1, "answers 404", num_failed=3)


def test_the_receipts_of_receivers_are_copied_once() -> None:
    incident = make_incident()
    (update,) = kept_receipts(state_of(incident, record("slack", OPENED, CLOSED), record("pagerduty", PAGED)))
    assert update.incident == replace(incident, receipts=(PAGED, OPENED, CLOSED))
    assert kept_receipts(state_of(update.incident, record("slack", OPENED, CLOSED), record("pagerduty", PAGED))) == ()


def test_receipts_stay_when_their_receiver_forgets_them() -> None:
    incident = make_incident(receipts=(OPENED,))
    (update,) = kept_receipts(state_of(incident, ReceiverRecord("slack"), record("pagerduty", PAGED)))
    assert update.incident.receipts == (PAGED, OPENED)


def test_incident_that_a_decision_writes_gets_receipts_later() -> None:
    state = state_of(make_incident(), record("slack", OPENED))
    assert kept_receipts(state, (UpdateIncident(make_incident()),)) == ()


def test_receipts_of_a_removed_incident_are_ignored() -> None:
    assert kept_receipts(state_of(make_incident(), record("slack", OPENED, topic="incident/gone"))) == ()


INCIDENT: Incident = make_incident()
MILESTONE = UpdateIncident(INCIDENT)
HALT = HaltRound(Halt(1, "a rank died", False, 0.0, ""))


def logged(*decisions: tuple[float, str, tuple[DriverAction, ...]]) -> list[str]:
    log = DecisionLog()
    lines = (log.line(Decision(actions, reason), now) for now, reason, actions in decisions)
    return [line for line in lines if line]


def test_only_news_is_logged() -> None:
    waits = "round 1 is halted: waiting for host-1 to stop"
    texts = [f"round 2 begins: {number} of 1000 hosts train" for number in range(5)]
    cases: dict[str, tuple[list[tuple[float, str, tuple[DriverAction, ...]]], list[str]]] = {
        "a retried action": ([(0, "a rank died", (HALT,)), (0.1, "a rank died", (HALT,))], ["a rank died"]),
        "a short state": ([(0, waits, ()), (0.9, waits, ())], []),
        "a lasting state": ([(now, waits, ()) for now in (0, 1, 2, 60)], [waits]),
        "changed numbers": ([(now, text, (MILESTONE,)) for now, text in enumerate(texts)], [texts[1]]),
        "a wait after an action": (
            [(0, waits, ()), (1, waits, ()), (2, "round 2", (HALT,)), (3, waits, ()), (4, waits, ())],
            [waits, "round 2", waits],
        ),
    }
    for name, (decisions, lines) in cases.items():
        assert logged(*decisions) == lines, name


def test_changed_host_or_word_is_logged() -> None:
    for first, second in [
        ("waiting for host-1 to stop", "waiting for host-2 to stop"),
        ("waiting for node3.rack-2 to stop", "waiting for node4.rack-2 to stop"),
        ("round 2 begins: 0 of 2 hosts train", "round 2 trains on 2 hosts"),
    ]:
        reported = logged((0, first, ()), (1, first, ()), (2, second, ()), (3, second, ()))
        assert reported == [first, second]
