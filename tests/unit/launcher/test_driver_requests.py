"""Requests of people while a round is being stopped: correct answers, and the requests are carried out."""

from __future__ import annotations

import pytest

from megatrain.contracts.records.incident import IncidentState
from megatrain.contracts.records.job_requests import JobRequest, RequestKind
from megatrain.contracts.records.record import encode
from tests.helpers.driver_story import DriverStory, begin
from tests.helpers.simulated_etcd import KEYS


def begin_to_save(job: DriverStory) -> str:
    """Let the round save and stop; its hosts have not finished."""
    request_id = job.ask(RequestKind.RESTART)
    job.drive()
    assert job.halted(1).is_saving
    return request_id


def break_round(job: DriverStory) -> None:
    """Halt the round because a worker died; its other host is still stopping."""
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    job.drive()
    assert not job.halted(1).is_saving


def test_eviction_during_a_saving_halt_is_done() -> None:
    job = begin()
    first = job.members(1)
    restart = begin_to_save(job)
    eviction = job.ask(RequestKind.EVICT, first[0])
    job.drive()
    reply = job.answer(eviction)
    assert (reply.is_accepted, reply.is_done) == (True, False)
    assert reply.text == f"{first[0]} is cordoned; round 1 saves and stops already, and the next one begins without it"
    assert KEYS.cordon(first[0]) in job.etcd.items
    revision = job.etcd.revision
    for _ in range(3):
        job.drive()
    assert job.etcd.revision == revision, "the answer is written once"
    job.go_on_until(job.goes_on(2), 2.0)
    job.go_on(1.0)
    assert first[0] not in job.members(2)
    assert list(job.rounds()) == [1, 2]
    assert job.answer(eviction).text == f"done: {first[0]} is cordoned, and round 2 began without it"
    assert job.answer(eviction).is_done
    assert job.answer(restart).is_done


def test_eviction_of_a_host_that_leaves_meanwhile_is_done_too() -> None:
    job = begin()
    first = job.members(1)
    begin_to_save(job)
    eviction = job.ask(RequestKind.EVICT, first[0])
    job.drive()
    job.lose(first[0])
    job.go_on_until(job.goes_on(2), 2.0)
    job.go_on(1.0)
    assert job.answer(eviction).text == f"done: {first[0]} is cordoned, and round 2 began without it"


def test_late_eviction_keeps_the_host_out() -> None:
    job = begin()
    first = job.members(1)
    begin_to_save(job)
    job.obey()
    job.ask(RequestKind.EVICT, first[0])
    job.drive()
    assert first[0] not in job.members(2)


@pytest.mark.parametrize("stop", [begin_to_save, break_round])
def test_restart_of_a_stopping_round_adds_no_round(stop) -> None:
    job = begin()
    stop(job)
    request_id = job.ask(RequestKind.RESTART)
    job.drive()
    reply = job.answer(request_id)
    assert (reply.is_accepted, reply.is_done) == (True, False)
    assert "already; then a new one begins" in reply.text
    job.go_on_until(job.goes_on(2), 2.0)
    job.go_on(1.0)
    assert job.answer(request_id).text == "done: round 2 trains; it began after this request"
    assert KEYS.request(request_id) not in job.etcd.items
    assert list(job.rounds()) == [1, 2], "one new round, not two"


def test_stop_during_a_save_waits_and_ends_the_job() -> None:
    job = begin()
    begin_to_save(job)
    job.etcd.put(KEYS.request("s"), encode(JobRequest("s", RequestKind.STOP, "slurm", exit_code=75)))
    job.drive()
    assert not job.is_over()
    assert (job.answer("s").text, job.answer("s").is_done) == (
        "round 1 saves and stops; then the job ends", False,
    )  # fmt: skip
    job.go_on(1.0)
    end = job.end()
    assert (end.exit_code, end.reason) == (75, "slurm requested stop")
    assert job.answer("s").is_done
    assert list(job.rounds()) == [1]
    (incident,) = job.incidents()
    assert (incident.state, incident.moments.halted is None) == (IncidentState.STOPPED, False)


def test_stop_while_hosts_are_missing_ends_the_job_at_once() -> None:
    job = begin(num_hosts=2)
    lost = job.members(1)[1]
    job.lose(lost)
    job.go_on(5.0)
    assert "waiting for 1 of 2 hosts" in job.reason()
    job.ask(RequestKind.STOP)
    job.go_on(0.2)
    assert job.end().exit_code == 0


def test_checkpoint_request_of_a_stopping_round_is_answered() -> None:
    job = begin()
    begin_to_save(job)
    request_id = job.ask(RequestKind.CHECKPOINT)
    job.drive()
    assert (job.answer(request_id).is_accepted, job.answer(request_id).is_done) == (True, True)
    assert "round 1 already saves and stops" in job.answer(request_id).text
    job = begin()
    break_round(job)
    request_id = job.ask(RequestKind.CHECKPOINT)
    job.drive()
    assert (job.answer(request_id).is_accepted, job.answer(request_id).is_done) == (False, True)
    assert "there is nothing to save before the next round trains" in job.answer(request_id).text


def test_requests_are_answered_in_order_of_revision() -> None:
    job = begin()
    for request_id in ("b", "a"):
        request = JobRequest(request_id, RequestKind.CHECK, "me@here", host="host-0")
        job.etcd.put(KEYS.request(request_id), encode(request))
    job.drive()
    assert KEYS.answer("b") in job.etcd.items
    assert KEYS.answer("a") not in job.etcd.items
