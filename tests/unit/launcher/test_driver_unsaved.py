"""While storage accepts no checkpoints, no round that could continue is ended, neither for speed nor on request."""

from __future__ import annotations

import pytest

from megatrain.contracts.records.host_records import HostSaves
from megatrain.contracts.records.host_verdict import HostVerdict
from megatrain.contracts.records.incident import IncidentKind
from megatrain.contracts.records.job_requests import RequestKind
from tests.helpers.driver_story import ELASTIC, DriverStory, begin
from tests.helpers.simulated_etcd import KEYS
from tests.helpers.written_verdicts import NUMERICS, STRAGGLER

FAILING = HostSaves(num_failed=2, failing_unix_s=1.0, error="No space left on device")
WHY = "the last 2 checkpoints could not be stored (host-0): No space left on device"


def hinder(job: DriverStory, saves: HostSaves | None = FAILING) -> None:
    """Let storage fail for one host of the round, or accept checkpoints again."""
    job.hosts["host-0"].saves = saves
    job.hosts["host-0"].write_status(job.now)
    job.drive()


@pytest.mark.slow(kept=["numerics"])
@pytest.mark.parametrize("verdict", [STRAGGLER, NUMERICS], ids=["straggler", "numerics"])
def test_a_verdict_waits_until_storage_takes_checkpoints(verdict: HostVerdict) -> None:
    job = begin()
    hinder(job)
    verdict_id = job.write_verdict(verdict)
    job.go_on(30.0, step_s=0.5)
    assert (list(job.rounds()), job.incidents(), job.has_outcome(verdict_id)) == ([1], [], False)
    approval = job.ask_about(RequestKind.APPROVE, verdict_id)
    job.drive()
    assert not job.answer(approval).is_done
    assert WHY in job.answer(approval).text
    hinder(job, HostSaves(saved_step=20, saved_unix_s=job.now))
    job.go_on_until(job.goes_on(2), 5.0)
    assert job.has_outcome(verdict_id)


def test_a_job_grows_when_storage_takes_checkpoints_again() -> None:
    job = begin(ELASTIC, 2, up=1)
    job.go_on_until(job.goes_on(1), 60.0)
    hinder(job)
    job.hosts["host-1"].start(job.now)
    job.go_on(60.0, step_s=0.5)
    assert job.members(1) == ["host-0"]
    assert WHY in job.reason()
    hinder(job, HostSaves(saved_step=20, saved_unix_s=job.now))
    job.go_on_until(job.goes_on(2), 5.0)
    assert job.members(2) == ["host-0", "host-1"]


def test_a_restart_is_refused_and_an_eviction_becomes_a_cordon() -> None:
    job = begin()
    hinder(job)
    restart, eviction = job.ask(RequestKind.RESTART), job.ask(RequestKind.EVICT, "host-2")
    job.go_on(1.0)
    assert (job.answer(restart).is_accepted, job.answer(restart).is_done) == (False, True)
    assert WHY in job.answer(restart).text
    assert (job.answer(eviction).is_accepted, job.answer(eviction).is_done) == (True, True)
    assert (
        job.answer(eviction).text
        == f"host-2 is cordoned and leaves when round 1 ends; the round continues for now: {WHY}"
    )
    assert KEYS.cordon("host-2") in job.etcd.items
    assert (list(job.rounds()), job.is_training()) == ([1], True)


def test_end_and_failure_do_not_wait_for_storage() -> None:
    job = begin()
    hinder(job)
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    job.go_on_until(job.goes_on(2), 5.0)
    assert [incident.kind for incident in job.incidents()] == [IncidentKind.FAILURE]
    job.ask(RequestKind.STOP)
    job.go_on_until(job.is_over, 5.0)
