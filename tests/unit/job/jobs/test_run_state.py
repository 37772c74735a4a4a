"""The state of a run whose etcd does not answer: pure rules, and real directories with a real lock."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.contracts.records.incident import IncidentState
from megatrain.contracts.records.record import encode
from megatrain_job.jobs.health import ReasonCode
from megatrain_job.jobs.run_state import (
    LastKnown,
    RunFacts,
    RunKind,
    read_facts,
    read_last_known,
    run_state_of,
)
from tests.helpers.launched_job import make_incident
from tests.helpers.waiting import DEADLINE_S

HERE = f"process 17 on {socket.gethostname()}"


STATES = [
        (RunFacts(is_run=False), RunKind.NEVER_STARTED, "no launch has written anything there"),
        (RunFacts(is_run=True, exit_code=0, has_launch=True), RunKind.ENDED, r"it finished \(exit code 0\)"),
        (RunFacts(is_run=True, exit_code=75), RunKind.ENDED, r"saved and stopped; .*\(exit code 75\)"),
        (RunFacts(is_run=True, exit_code=66), RunKind.ENDED, "it failed, with exit code 66"),
        (RunFacts(is_run=True, has_launch=True, holder=HERE), RunKind.KILLED, r"its launch \(process 17 on .*is gone"),
        (RunFacts(is_run=True, has_launch=True, is_held=True), RunKind.UNREACHABLE, "launch is running"),
        # The records of the previous launch prove nothing about a running one.
        (RunFacts(is_run=True, has_launch=True, is_held=True, exit_code=0), RunKind.UNREACHABLE, "launch is running"),
        (
            RunFacts(is_run=True, has_launch=True, holder="process 17 on elsewhere", is_of_here=False),
            RunKind.UNREACHABLE, r"whether its launch \(process 17 on elsewhere\) is running cannot be seen",
        ),
        (RunFacts(is_run=True), RunKind.UNREACHABLE, "use --rdzv-endpoint as the launch did"),
]  # fmt: skip


def test_run_state_follows_from_the_facts() -> None:
    codes = {RunKind.KILLED: ReasonCode.NOT_RUNNING, RunKind.UNREACHABLE: ReasonCode.UNREACHABLE}
    for facts, kind, headline in STATES:
        found = run_state_of(facts)
        assert found.kind is kind, facts
        assert found.exit_code == (facts.exit_code if kind is RunKind.ENDED else None), facts
        assert re.search(headline, found.headline), facts
        code = ReasonCode.FAILED if found.exit_code == 66 else codes.get(kind)
        reported = [(reason.code, reason.text) for reason in found.health.reasons]
        assert reported == ([] if code is None else [(code, found.headline)]), facts


STOPPED = make_incident(state=IncidentState.STOPPED)
ELSEWHERE = RunFacts(is_run=True)
AT_ITS_END = LastKnown(step=1240, train_steps=1240)


WITH_RECORDS = [
    (ELSEWHERE, AT_ITS_END, "finished", "ended: all 1,240 steps are done"),
    (
        ELSEWHERE,
        LastKnown(incident=STOPPED),
        "failed",
        "ended: stopped by its last incident: rank 3 on host-2 was kil",
    ),
    (ELSEWHERE, LastKnown(incident=make_incident(), step=5, train_steps=6), "unreachable", "unreachable: it was"),
    (
        replace(ELSEWHERE, exit_code=66),
        LastKnown(incident=STOPPED),
        "failed",
        "exit code 66; its last incident: rank",
    ),
    # For a running launch, the past proves nothing.
    (replace(ELSEWHERE, is_held=True), AT_ITS_END, "unreachable", "launch is running"),
    # its last checkpoint may be missing
    (replace(ELSEWHERE, has_launch=True), AT_ITS_END, "killed", "is gone"),
]


def test_the_last_records_of_a_run_count_without_a_launch() -> None:
    for facts, last, state, headline in WITH_RECORDS:
        found = run_state_of(facts, last)
        assert found.state == state, (facts, last)
        assert headline in found.headline, (facts, last)
        assert found.health.level == ("green" if state == "finished" else "red"), (facts, last)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was launched with its own etcd by a process that is gone."""
    place = tmp_path / "run" / "coordination"
    place.mkdir(parents=True)
    (place / "lock").write_text(f"{HERE}\n")
    return place.parent


def test_facts_are_read_from_a_run_directory(run: Path, tmp_path: Path) -> None:
    assert read_facts(tmp_path / "nowhere") == RunFacts(is_run=False)
    (tmp_path / "other").mkdir()
    assert read_facts(tmp_path / "other").is_run is False
    assert read_facts(run) == RunFacts(is_run=True, has_launch=True, holder=HERE, is_of_here=True)
    (run / "coordination" / "exit-code").write_text("75\n")
    assert read_facts(run).exit_code == 75
    (run / "coordination" / "lock").write_text("process 17 on elsewhere\n")
    assert read_facts(run).is_of_here is False


@pytest.mark.parametrize("name", ["coordination/lock", "lock"])
def test_run_whose_lock_is_held_is_unreachable(run: Path, name: str) -> None:
    (run / name).touch()
    with (run / name).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert read_facts(run).is_held is True
        assert run_state_of(read_facts(run)).kind is RunKind.UNREACHABLE
    assert run_state_of(read_facts(run)).kind is RunKind.KILLED


def test_exit_code_that_is_not_a_number_is_ignored(run: Path) -> None:
    for text in ("", "-9", "1e3", "\x1b[2J", "9" * 99):
        (run / "coordination" / "exit-code").write_text(text)
        assert read_facts(run).exit_code is None, text


def test_special_file_does_not_block_the_reader(run: Path) -> None:
    for name in ("exit-code", "lock"):
        (run / "coordination" / name).unlink(missing_ok=True)
        os.mkfifo(run / "coordination" / name)
    (run / "incidents").mkdir()
    os.mkfifo(run / "incidents" / "1.json")
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.extend([read_facts(run), read_last_known(run)]), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert len(answers) == 2


def test_last_known_facts_of_a_run(run: Path) -> None:
    assert read_last_known(run).incident is None
    (run / "incidents").mkdir()
    for name, state in (("0001", IncidentState.RECOVERED), ("0002", IncidentState.STOPPED)):
        one = make_incident(name, state=state)
        (run / "incidents" / f"{one.incident_id}.json").write_bytes(encode(one))
    found = read_last_known(run)
    assert found.incident is not None
    assert (found.incident.state, found.saved_step) == (IncidentState.STOPPED, None)
