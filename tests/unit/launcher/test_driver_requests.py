"""Requests of people while a round is being stopped: correct answers, and the requests are carried out."""

from __future__ import annotations

import pytest

from megatrain.contracts.records.incident import IncidentState
from megatrain.contracts.records.job_requests import JobRequest, RequestKind
from megatrain.contracts.records.record import encode
from tests.helpers.driver_story import (
    answer,
    ask,
    begin,
    drive,
    ended,
    go_on,
    go_on_until,
    halted,
    incidents,
    members,
)
from tests.helpers.simulated_etcd import KEYS
from tests.helpers.simulated_job import SimulatedJob


def begin_to_save(job: SimulatedJob) -> str:
    """Let the round save and stop; its hosts have not finished."""
    request_id = ask(job, RequestKind.RESTART)
    drive(job)
    assert halted(job, 1).is_saving
    return request_id


def break_round(job: SimulatedJob) -> None:
    """Halt the round because a worker died; its other host is still stopping."""
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    drive(job)
    assert not halted(job, 1).is_saving


def test_eviction_during_a_saving_halt_is_done() -> None:
    job = begin()
    first = members(job, 1)
    restart = begin_to_save(job)
    eviction = ask(job, RequestKind.EVICT, first[0])
    drive(job)
    reply = answer(job, eviction)
    assert (reply.is_accepted, reply.is_done) == (True, False)
    assert reply.text == f"{first[0]} is cordoned; round 1 saves and stops already, and the next one begins without it"
    assert KEYS.cordon(first[0]) in job.etcd.items
    revision = job.etcd.revision
    for _ in range(3):
        drive(job)
    assert job.etcd.revision == revision, "the answer is written once"
    go_on_until(job, lambda: 2 in job.rounds() and job.is_training(), 2.0)
    go_on(job, 1.0)
    assert first[0] not in members(job, 2)
    assert list(job.rounds()) == [1, 2]
    assert answer(job, eviction).text == f"done: {first[0]} is cordoned, and round 2 began without it"
    assert answer(job, eviction).is_done
    assert answer(job, restart).is_done


def test_eviction_of_a_host_that_leaves_meanwhile_is_done_too() -> None:
    job = begin()
    first = members(job, 1)
    begin_to_save(job)
    eviction = ask(job, RequestKind.EVICT, first[0])
    drive(job)
    job.hosts[first[0]].kill()
    job.hosts[first[0]].lose_lease()
    go_on_until(job, lambda: 2 in job.rounds() and job.is_training(), 2.0)
    go_on(job, 1.0)
    assert answer(job, eviction).text == f"done: {first[0]} is cordoned, and round 2 began without it"


def test_late_eviction_keeps_the_host_out() -> None:
    job = begin()
    first = members(job, 1)
    begin_to_save(job)
    for host in job.hosts.values():  # All have stopped: the next round is due.
        host.read_log(1000)
        host.act(job.now)
    ask(job, RequestKind.EVICT, first[0])
    drive(job)
    assert first[0] not in members(job, 2)


@pytest.mark.parametrize("stop", [begin_to_save, break_round])
def test_restart_of_a_stopping_round_adds_no_round(stop) -> None:
    job = begin()
    stop(job)
    request_id = ask(job, RequestKind.RESTART)
    drive(job)
    reply = answer(job, request_id)
    assert (reply.is_accepted, reply.is_done) == (True, False)
    assert "already; then a new one begins" in reply.text
    go_on_until(job, lambda: 2 in job.rounds() and job.is_training(), 2.0)
    go_on(job, 1.0)
    assert answer(job, request_id).text == "done: round 2 trains; it began after this request"
    assert KEYS.request(request_id) not in job.etcd.items
    assert list(job.rounds()) == [1, 2], "one new round, not two"


def test_stop_during_a_save_waits_and_ends_the_job() -> None:
    job = begin()
    begin_to_save(job)
    job.etcd.put(KEYS.request("s"), encode(JobRequest("s", RequestKind.STOP, "slurm", exit_code=75)))
    drive(job)
    assert ended(job) is None
    assert (answer(job, "s").text, answer(job, "s").is_done) == (
        "round 1 saves and stops; then the job ends", False,
    )  # fmt: skip
    go_on(job, 1.0)
    end = ended(job)
    assert end is not None
    assert (end.exit_code, end.reason) == (75, "slurm requested stop")
    assert answer(job, "s").is_done
    assert list(job.rounds()) == [1]
    (incident,) = incidents(job)
    assert (incident.state, incident.moments.halted is None) == (IncidentState.STOPPED, False)


def test_stop_while_hosts_are_missing_ends_the_job_at_once() -> None:
    job = begin(num_hosts=2)
    lost = members(job, 1)[1]
    job.hosts[lost].kill()
    job.hosts[lost].lose_lease()
    go_on(job, 5.0)
    assert "waiting for 1 of 2 hosts" in job.driver.decide(job.now).reason
    ask(job, RequestKind.STOP)
    go_on(job, 0.2)
    end = ended(job)
    assert end is not None
    assert end.exit_code == 0


def test_checkpoint_request_of_a_stopping_round_is_answered() -> None:
    job = begin()
    begin_to_save(job)
    request_id = ask(job, RequestKind.CHECKPOINT)
    drive(job)
    assert (answer(job, request_id).is_accepted, answer(job, request_id).is_done) == (True, True)
    assert "round 1 already saves and stops" in answer(job, request_id).text
    job = begin()
    break_round(job)
    request_id = ask(job, RequestKind.CHECKPOINT)
    drive(job)
    assert (answer(job, request_id).is_accepted, answer(job, request_id).is_done) == (False, True)
    assert "there is nothing to save before the next round trains" in answer(job, request_id).text


def test_requests_are_answered_in_order_of_revision() -> None:
    job = begin()
    for request_id in ("b", "a"):
        request = JobRequest(request_id, RequestKind.CHECK, "me@here", host="host-0")
        job.etcd.put(KEYS.request(request_id), encode(request))
    drive(job)
    assert KEYS.answer("b") in job.etcd.items
    assert KEYS.answer("a") not in job.etcd.items
