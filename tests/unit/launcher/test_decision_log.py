"""The driver's log has a line for each new decision, and none for its repetitions."""

from __future__ import annotations

from megatrain.contracts.records.incident import Incident
from megatrain.contracts.records.rounds import Halt
from megatrain_launcher.driver.actions import Decision, DriverAction, HaltRound, UpdateIncident
from megatrain_launcher.driver.decision_log import DecisionLog
from tests.helpers.launched_job import make_incident

INCIDENT: Incident = make_incident()
MILESTONE = UpdateIncident(INCIDENT)
HALT = HaltRound(Halt(1, "a rank died", False, 0.0, ""))


def logged(*decisions: tuple[float, str, tuple[DriverAction, ...]]) -> list[str]:
    log = DecisionLog()
    lines = (log.line(Decision(actions, reason), now) for now, reason, actions in decisions)
    return [line for line in lines if line]


def test_retried_action_is_logged_once() -> None:
    assert logged((0, "a rank died", (HALT,)), (0.1, "a rank died", (HALT,))) == ["a rank died"]


def test_lasting_states_are_logged_once_and_short_ones_never() -> None:
    waits = "round 1 is halted: waiting for host-1 to stop"
    assert logged((0, waits, ()), (0.9, waits, ())) == []
    assert logged((0, waits, ()), (1, waits, ()), (2, waits, ()), (60, waits, ())) == [waits]


def test_changed_numbers_are_not_logged_again() -> None:
    texts = [f"round 2 begins: {number} of 1000 hosts train" for number in range(5)]
    assert logged(*((float(now), text, (MILESTONE,)) for now, text in enumerate(texts))) == [texts[1]]


def test_changed_host_or_word_is_logged() -> None:
    for first, second in [
        ("waiting for host-1 to stop", "waiting for host-2 to stop"),
        ("waiting for node3.rack-2 to stop", "waiting for node4.rack-2 to stop"),
        ("round 2 begins: 0 of 2 hosts train", "round 2 trains on 2 hosts"),
    ]:
        reported = logged((0, first, ()), (1, first, ()), (2, second, ()), (3, second, ()))
        assert reported == [first, second]


def test_same_wait_is_logged_again_after_an_action() -> None:
    waits = "waiting for 1 of 2 hosts"
    reported = logged((0, waits, ()), (1, waits, ()), (2, "round 2", (HALT,)), (3, waits, ()), (4, waits, ()))
    assert reported == [waits, "round 2", waits]
