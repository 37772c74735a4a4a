"""Training with abnormal numbers: a verdict rolls back to an earlier step, a bounded number of times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.host_verdict import OutcomeKind
from megatrain.contracts.records.incident import IncidentKind, IncidentState
from megatrain.contracts.records.rounds import Rollback
from megatrain_launcher.driver.policy import Policy
from tests.helpers.driver_story import APPROVAL, DRY_RUN, POLICY, DriverStory, begin
from tests.helpers.written_verdicts import NUMERICS


def test_numerics_verdict_rolls_back_without_saving() -> None:
    job = begin()
    verdict_id = job.write_verdict(NUMERICS)
    job.drive()
    assert not job.halted(1).is_saving
    job.go_on_until(job.goes_on(2), 5.0)
    job.go_on(1.0)
    (incident,) = job.incidents()
    assert (incident.kind, incident.action, incident.state) == (
        IncidentKind.NUMERICS, "rollback", IncidentState.RECOVERED,
    )  # fmt: skip
    rollback = Rollback(incident.incident_id, 21, 21, 23)
    assert (incident.rollback, job.rounds()[2].rollback) == (rollback, rollback)
    assert job.members(2) == job.members(1)
    outcome = job.outcome(verdict_id)
    assert (outcome.kind, outcome.incident) == (OutcomeKind.ACTED, incident.incident_id)
    # The round after a failure reports it again: the previous round may not have reached it.
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    job.go_on_until(job.goes_on(3), 5.0)
    assert job.rounds()[3].rollback == rollback


def test_rollback_to_impossible_steps_is_declined() -> None:
    job = begin()
    for changes in [
        {"rollback_to": None},
        {"skip_to": None},
        {"rollback_to": 22},
        {"skip_to": 20},
        {"rollback_to": -1, "skip_from": -1},
        {"skip_to": 21 + 1000},
        {"skip_to": 10**7},
    ]:
        assert "roll back to" in job.declined(NUMERICS, **changes), changes
    job.go_on(1.0)
    assert list(job.rounds()) == [1]


def roll_back(job: DriverStory, number: int) -> None:
    """Roll back from round `number` to the next one."""
    job.write_verdict(NUMERICS, round=number)
    job.go_on_until(job.goes_on(number + 1), 5.0)
    job.go_on(1.0)


def test_job_beyond_its_rollbacks_stops_with_its_failures_code() -> None:
    job = begin()
    roll_back(job, 1)
    roll_back(job, 2)
    assert not job.is_over()
    verdict_id = job.write_verdict(NUMERICS, round=3)
    job.go_on_until(job.is_over, 5.0)
    end = job.end()
    assert end.exit_code == ExitCode.NON_FINITE
    assert "has already rolled back 2 times within an hour" in end.reason
    assert job.outcome(verdict_id).kind is OutcomeKind.ACTED
    assert job.incidents()[-1].state is IncidentState.STOPPED


def test_rollbacks_of_an_hour_ago_do_not_count() -> None:
    job = begin()
    roll_back(job, 1)
    roll_back(job, 2)
    job.now += 3600.0
    job.go_on(1.0)
    roll_back(job, 3)
    assert not job.is_over()


def test_zero_rollbacks_means_never() -> None:
    job = begin(replace(POLICY, max_rollbacks=0))
    assert "diagnostics.max_rollbacks=0" in job.declined(NUMERICS)
    assert not job.is_over()


@pytest.mark.parametrize(("policy", "kind"), [(APPROVAL, OutcomeKind.WAITING), (DRY_RUN, OutcomeKind.DRY_RUN)])
def test_rollback_follows_the_mode_of_evictions(policy: Policy, kind: OutcomeKind) -> None:
    job = begin(policy)
    verdict_id = job.write_verdict(NUMERICS)
    job.go_on(1.0)
    assert job.outcome(verdict_id).kind is kind
    assert job.incidents() == []


def test_exit_code_67_rolls_back_before_the_skipped_steps() -> None:
    """The trainer's own alarm: a number of consecutive steps changed nothing."""
    job = begin(replace(POLICY, max_skipped_steps=4))
    job.go_on(1.0)
    job.hosts["host-0"].fail(job.now, is_cascade=False, exit_code=67)
    job.go_on_until(job.goes_on(2), 5.0)
    (incident,) = job.incidents()
    step = incident.last_step
    assert step is not None
    assert (incident.kind, incident.action, incident.label) == (IncidentKind.FAILURE, "rollback", "numerics")
    assert job.rounds()[2].rollback == Rollback(incident.incident_id, step - 4, step - 4, step - 1)
    job.go_on(0.3)
    # It failed again and got no further: the batches are not the cause.
    job.hosts["host-0"].fail(job.now, is_cascade=False, exit_code=67)
    job.go_on_until(job.is_over, 5.0)
    assert job.end().exit_code == ExitCode.NON_FINITE
