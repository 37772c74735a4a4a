"""While storage accepts no checkpoints, no round that could continue is ended, neither for speed nor on request."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatrain.contracts.records.host_records import HostSaves
from megatrain.contracts.records.host_verdict import HostVerdict
from megatrain.contracts.records.incident import IncidentKind
from megatrain.contracts.records.job_requests import RequestKind
from tests.helpers.driver_story import (
    ELASTIC,
    answer,
    ask,
    begin,
    drive,
    ended,
    go_on,
    go_on_until,
    incidents,
    members,
)
from tests.helpers.simulated_etcd import KEYS
from tests.helpers.simulated_job import SimulatedJob
from tests.helpers.written_verdicts import NUMERICS, STRAGGLER, ask_about, outcome_of, write_verdict

FAILING = HostSaves(num_failed=2, failing_unix_s=1.0, error="No space left on device")
WHY = "the last 2 checkpoints could not be stored (host-0): No space left on device"


def hinder(job: SimulatedJob, saves: HostSaves | None = FAILING) -> None:
    """Let storage fail for one host of the round, or accept checkpoints again."""
    job.hosts["host-0"].saves = saves
    job.hosts["host-0"].write_status(job.now)
    drive(job)


def a_second_round(job: SimulatedJob) -> Callable[[], bool]:
    return lambda: 2 in job.rounds() and job.is_training()


@pytest.mark.slow(kept=["numerics"])
@pytest.mark.parametrize("verdict", [STRAGGLER, NUMERICS], ids=["straggler", "numerics"])
def test_a_verdict_waits_until_storage_takes_checkpoints(verdict: HostVerdict) -> None:
    job = begin()
    hinder(job)
    verdict_id = write_verdict(job, verdict)
    go_on(job, 30.0, step_s=0.5)
    assert (list(job.rounds()), incidents(job), outcome_of(job, verdict_id)) == ([1], [], None)
    approval = ask_about(job, RequestKind.APPROVE, verdict_id)
    drive(job)
    assert not answer(job, approval).is_done
    assert WHY in answer(job, approval).text
    hinder(job, HostSaves(saved_step=20, saved_unix_s=job.now))
    go_on_until(job, a_second_round(job), 5.0)
    assert outcome_of(job, verdict_id) is not None


def test_a_job_grows_when_storage_takes_checkpoints_again() -> None:
    job = begin(ELASTIC, 2, up=1)
    go_on_until(job, lambda: 1 in job.rounds() and job.is_training(), 60.0)
    hinder(job)
    job.hosts["host-1"].start(job.now)
    go_on(job, 60.0, step_s=0.5)
    assert members(job, 1) == ["host-0"]
    decided = job.driver.decide(job.now)
    assert decided is not None
    assert WHY in decided.reason
    hinder(job, HostSaves(saved_step=20, saved_unix_s=job.now))
    go_on_until(job, a_second_round(job), 5.0)
    assert members(job, 2) == ["host-0", "host-1"]


def test_a_restart_is_refused_and_an_eviction_becomes_a_cordon() -> None:
    job = begin()
    hinder(job)
    restart, eviction = ask(job, RequestKind.RESTART), ask(job, RequestKind.EVICT, "host-2")
    go_on(job, 1.0)
    assert (answer(job, restart).is_accepted, answer(job, restart).is_done) == (False, True)
    assert WHY in answer(job, restart).text
    assert (answer(job, eviction).is_accepted, answer(job, eviction).is_done) == (True, True)
    assert (
        answer(job, eviction).text
        == f"host-2 is cordoned and leaves when round 1 ends; the round continues for now: {WHY}"
    )
    assert KEYS.cordon("host-2") in job.etcd.items
    assert (list(job.rounds()), job.is_training()) == ([1], True)


def test_end_and_failure_do_not_wait_for_storage() -> None:
    job = begin()
    hinder(job)
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    go_on_until(job, a_second_round(job), 5.0)
    assert [incident.kind for incident in incidents(job)] == [IncidentKind.FAILURE]
    ask(job, RequestKind.STOP)
    go_on_until(job, lambda: ended(job) is not None, 5.0)
