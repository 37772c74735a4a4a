"""Decisions in whole sequences: simulated hosts that obey, and a driver that sees everything at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.contracts.records.host_records import CheckOutcome, CheckReport, CheckResult, HostPhase
from megatrain.contracts.records.incident import IncidentKind, IncidentState
from megatrain.contracts.records.job_requests import JobRequest, RequestKind
from megatrain.contracts.records.problem_reports import DriverReport
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import Halt, HostCommand, JobEnd
from megatrain_launcher.driver.decide import decide
from megatrain_launcher.driver.writes import writes_of
from megatrain_launcher.liveness import orders_lost_within_s
from tests.helpers.driver_story import ELASTIC, POLICY, DriverStory, begin
from tests.helpers.simulated_etcd import KEYS


def test_first_round_begins_at_once_when_no_host_is_missing() -> None:
    job = DriverStory(ELASTIC, 2)
    job.hosts["host-0"].start(job.now)
    job.go_on(1.5)
    assert not job.rounds()
    job.go_on(1.0)
    assert job.members(1) == ["host-0"]
    at_once = DriverStory(ELASTIC, 2)
    for host in at_once.hosts.values():
        host.start(at_once.now)
    at_once.go_on(0.2)
    assert len(at_once.members(1)) == 2


def test_killed_rank_restarts_everything_with_the_same_ranks() -> None:
    job = begin()
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    failed_at = job.now
    took_s = job.go_on_until(job.goes_on(2), 2.0)
    assert took_s < 1.0
    assert job.members(2) == job.members(1)
    job.go_on(0.3)
    (incident,) = job.incidents()
    assert (incident.kind, incident.state, incident.action) == ("failure", "recovered", "restart")
    assert (incident.culprit_hosts, incident.next_round) == (("host-0",), 2)
    moments = incident.moments
    assert failed_at <= moments.detected <= moments.halted <= moments.round_written <= moments.first_step
    assert incident.steps_lost is not None
    assert incident.steps_lost > 0
    assert 0 < incident.effective_time_ratio < 1


def test_broken_host_is_evicted_and_the_spare_takes_its_ranks() -> None:
    job = begin()
    first = job.members(1)
    job.hosts[first[0]].fail(job.now, is_cascade=False, exit_code=1, label="gpu_hardware", action="evict_host")
    job.go_on_until(job.goes_on(2), 2.0)
    (spare,) = set(job.hosts) - set(first)
    assert job.members(2) == [spare, first[1]]
    assert KEYS.cordon(first[0]) in job.etcd.items


def test_dead_executor_is_proven_by_its_port_before_its_lease() -> None:
    job = begin()
    first = job.members(1)
    job.hosts[first[1]].kill()
    job.hosts[first[0]].fail(job.now, is_cascade=True, exit_code=69)
    took_s = job.go_on_until(job.goes_on(2), 3.0)
    assert took_s < 1.5
    assert first[1] not in job.members(2)
    job.go_on(0.3)
    (incident,) = job.incidents()
    assert (incident.kind, incident.culprit_hosts) == ("host-lost", (first[1],))
    assert any("probed" in sentence for sentence in incident.evidence)


def test_vanished_lease_while_steps_advance_is_held() -> None:
    job = begin()
    lost = job.members(1)[1]
    job.cut_off(lost)
    job.go_on(60.0, step_s=0.5)
    assert list(job.rounds()) == [1]
    (incident,) = job.incidents()
    assert (incident.kind, incident.state, incident.culprit_hosts) == ("control-plane", "held", (lost,))
    assert "held" in job.reason()
    job.reconnect(lost)
    job.go_on(1.0)
    assert list(job.rounds()) == [1]
    (incident,) = job.incidents()
    assert "over_unix_s" in incident.notes


def test_leases_regained_without_a_driver_are_reported_once() -> None:
    job = begin()
    both = job.members(1)
    for name in both:
        job.hosts[name].lose_lease()
        job.hosts[name].register(job.now)
    job.change_driver()
    job.go_on(5.0)
    assert list(job.rounds()) == [1]
    (incident,) = job.incidents()
    assert (incident.kind, incident.state, incident.action) == ("control-plane", "held", "hold")
    assert sorted(incident.culprit_hosts) == sorted(both)
    job.change_driver()
    job.go_on(5.0)
    assert len(job.incidents()) == 1
    job.hosts[both[0]].lose_lease()
    job.hosts[both[0]].register(job.now)
    job.go_on(5.0)
    assert [one.culprit_hosts for one in job.incidents()[1:]] == [(both[0],)]


def test_spare_parks_and_may_lose_its_lease_without_an_incident() -> None:
    job = begin()
    assert job.is_training()
    assert len(job.members(1)) == 2
    (spare,) = set(job.hosts) - set(job.members(1))
    assert job.hosts[spare].phase is HostPhase.PARKED
    job.hosts[spare].lose_lease()
    job.hosts[spare].register(job.now)
    job.go_on(5.0)
    assert job.incidents() == []


def test_vanished_lease_and_a_stall_is_a_lost_host() -> None:
    job = begin()
    first = job.members(1)
    job.cut_off(first[1])
    job.stall(first[0])
    stalled_at = job.now
    # The host's silence limit is nearly over; then its reaction time follows.
    assert job.go_on_until(job.goes_on(2), 4.0) > 1.5
    assert first[1] not in job.members(2)
    # The steps stopped 5 s before a host reported it.
    assert job.incidents()[0].moments.began == pytest.approx(stalled_at - 5.0)
    session = job.hosts[first[1]].session
    assert session in job.rounds()[2].fenced
    job.reconnect(first[1])
    job.go_on(1.0)
    assert job.hosts[first[1]].session != session


def test_step_that_is_reported_late_opens_no_second_incident() -> None:
    job = begin()
    first = job.members(1)
    job.drive()
    job.cut_off(first[1])
    job.drive()
    job.now += 1.5
    last = job.hosts[first[0]]
    last.step += 1
    last.write_status(job.now)
    job.drive()
    assert job.incidents() == []
    job.stall(first[0])
    job.go_on_until(job.goes_on(2), 6.0)
    assert [incident.kind for incident in job.incidents()] == ["host-lost"]


def test_many_vanished_leases_are_the_control_planes_fault() -> None:
    policy = replace(POLICY, min_hosts=4, max_hosts=4, feasible_counts={4: 1})
    job = begin(policy, 4)
    for name in job.members(1)[1:]:
        job.cut_off(name)
    survivor = job.hosts[job.members(1)[0]]
    survivor.stall, survivor.phase = None, HostPhase.RUNNING
    for _ in range(300):
        job.now += 0.2
        job.driver.read_log(1000, job.now)
        job.probe(job.driver.decide(job.now))
    assert list(job.rounds()) == [1]
    assert writes_of(job.driver.decide(job.now).actions, KEYS).operations == ()
    job.stall(survivor.name)
    job.go_on(1.0)
    assert KEYS.halt(1) in job.etcd.items


def test_returned_host_delays_the_next_round() -> None:
    """The driver has no event about it yet: the transaction itself checks."""
    job = begin()
    first = job.members(1)
    lost = job.hosts[first[1]]
    lost.is_connected = False
    lost.lose_lease()
    job.hosts[first[0]].fail(job.now, is_cascade=False)
    job.go_on(1.0)
    lost.is_connected = True
    lost.register(job.now)
    for _ in range(100):  # without receiving any event
        job.now += 0.2
        job.driver.decide(job.now)
    assert list(job.rounds()) == [1]


def test_host_that_does_not_stop_is_left_out_and_fenced() -> None:
    job = begin()
    first = job.members(1)
    stuck = job.hosts[first[1]]
    stuck.is_connected = False  # Its lease is valid, and probes get no answer.
    job.hosts[first[0]].fail(job.now, is_cascade=False)
    # Its orders may not arrive: it may detect this only after this time, and then obeys its deadlines.
    job.go_on(orders_lost_within_s(POLICY.lease_ttl_s))
    assert list(job.rounds()) == [1]
    job.go_on_until(lambda: 2 in job.rounds(), 3.0)
    assert first[1] not in job.members(2)
    assert stuck.session in job.rounds()[2].fenced
    # Even if it finally reports that it has stopped, no later round includes this session.
    stuck.running, stuck.is_connected, stuck.phase, stuck.status_round = 0, True, HostPhase.STOPPED, 1
    stuck.write_status(job.now)
    stuck.is_connected = False
    for name in job.members(2)[:1]:
        job.hosts[name].read_log(1000)
        job.hosts[name].act(job.now)
        job.lose(name)
    job.go_on(20.0, step_s=0.5)
    assert all(stuck.session not in [part.session for part in one.hosts] for n, one in job.rounds().items() if n > 1)


def test_missing_hosts_are_named_then_the_job_ends() -> None:
    job = begin(num_hosts=2)
    lost = job.members(1)[1]
    job.lose(lost)
    job.go_on(20.0, step_s=0.5)
    assert f"{lost} (gone since" in job.reason()
    assert "UTC" in job.reason()
    job.go_on(45.0, step_s=0.5)
    end = job.end()
    assert end.exit_code == 1
    assert lost in end.reason
    assert "recovery.join_timeout_s=60" in end.reason


def test_elastic_job_shrinks_after_a_while_and_grows_again() -> None:
    job = begin(ELASTIC, 2)
    lost = job.members(1)[1]
    job.lose(lost)
    job.go_on(25.0, step_s=0.5)
    assert list(job.rounds()) == [1]
    job.go_on_until(job.goes_on(2), 30.0, step_s=0.5)
    assert len(job.members(2)) == 1
    job.hosts[lost].start(job.now)
    job.go_on(9.0)
    assert list(job.rounds()) == [1, 2]
    job.go_on_until(job.goes_on(3), 5.0)
    assert len(job.members(3)) == 2
    assert decode(Halt, job.etcd.items[KEYS.halt(2)].value, "halt").is_saving


def test_job_ends_when_all_workers_are_done() -> None:
    job = begin()
    for name in job.members(1):
        host = job.hosts[name]
        host.running, host.phase = 0, HostPhase.DONE
        host.write_status(job.now)
    for name in job.members(1):  # The simulated status has no exit code.
        key = KEYS.status(name)
        status = job.etcd.items[key].value.replace(b'"phase":"done"', b'"phase":"done","exit_code":75')
        job.etcd.put(key, status)
    job.driver.read_log(1000, job.now)
    job.driver.decide(job.now)
    assert job.end() == JobEnd(75, "the workers were asked to stop, and saved", job.now, 1)
    assert KEYS.halt(1) in job.etcd.items


def test_wrong_configuration_stops_the_job_with_its_code() -> None:
    job = begin()
    job.hosts["host-0"].fail(job.now, is_cascade=False, exit_code=78)
    job.go_on(1.0)
    assert job.end().exit_code == 78
    assert job.incidents()[0].state is IncidentState.STOPPED
    assert not job.live_rounds()


def test_host_returns_when_a_later_check_passes() -> None:
    job = begin(num_hosts=2)
    name = job.members(1)[0]
    job.hosts[name].fail(job.now, is_cascade=False, exit_code=-11, label="segfault", action="restart_then_check")
    job.go_on(5.0)
    assert list(job.rounds()) == [1]
    (command,) = job.records_of(HostCommand, "commands")
    assert (command.kind, command.hosts) == ("check", (name,))
    result = CheckResult("matmul", CheckOutcome.FAILED, "slow", 0.1)
    report = CheckReport(name, job.hosts[name].session, job.now, (result,))
    job.etcd.put(KEYS.check(command.request, name), encode(report))
    job.go_on(5.0)
    assert list(job.rounds()) == [1]
    job.etcd.put(KEYS.check("asked", name), encode(replace(report, at_unix_s=job.now, results=())))
    job.go_on(0.5)
    assert name in job.members(2)


def test_host_must_pass_its_check_although_a_spare_goes_on() -> None:
    """Otherwise it would be in the round after the next one without a check."""
    job = begin(num_hosts=3)
    name = job.members(1)[0]
    job.hosts[name].fail(job.now, is_cascade=False, exit_code=-11, label="segfault", action="restart_then_check")
    job.go_on_until(lambda: len(job.rounds()) == 2, 20.0)
    assert name not in job.members(2)
    other = next(member for member in job.members(2) if member in job.members(1))
    job.go_on(5.0)
    job.lose(other)
    job.go_on(30.0, step_s=0.5)
    assert list(job.rounds()) == [1, 2], "there is no other host, and this one is not known to be fit"
    (command,) = job.records_of(HostCommand, "commands")
    report = CheckReport(name, job.hosts[name].session, job.now, ())
    job.etcd.put(KEYS.check(command.request, name), encode(report))
    job.go_on(0.5)
    assert name in job.members(3)


@pytest.mark.parametrize("kind", [RequestKind.RESTART, RequestKind.EVICT])
def test_requested_restart_or_eviction_begins_a_round(kind: RequestKind) -> None:
    job = begin()
    first = job.members(1)
    request_id = job.ask(kind, first[0])
    job.go_on(0.1)
    assert decode(Halt, job.etcd.items[KEYS.halt(1)].value, "halt").is_saving
    assert job.answer(request_id).is_accepted
    job.go_on_until(job.goes_on(2), 2.0)
    job.go_on(1.0)
    assert job.answer(request_id).is_done
    assert KEYS.request(request_id) not in job.etcd.items
    assert (first[0] in job.members(2)) is (kind is RequestKind.RESTART)
    assert job.incidents()[0].kind is IncidentKind.REQUEST


def test_person_stops_the_job() -> None:
    job = begin()
    request_id = job.ask(RequestKind.STOP)
    job.go_on(1.0)
    assert job.end().exit_code == 0
    assert job.answer(request_id).is_done
    late = job.ask(RequestKind.RESTART)
    job.go_on(0.3)
    assert not job.answer(late).is_accepted


def test_a_stop_without_a_checkpoint_is_reported() -> None:
    job = begin()
    request_id = job.ask(RequestKind.STOP)
    job.etcd.put(KEYS.request("later"), encode(JobRequest("later", RequestKind.STOP, "me")))
    job.go_on(0.1)
    job.hosts[job.members(1)[0]].fail(job.now, is_cascade=False, exit_code=74)
    job.go_on(1.0)
    end = job.end()
    assert end.exit_code == 74
    assert "requested stop, but not all workers saved: rank 0 ended with exit code 74 (save failed)" in end.reason
    assert not job.answer(request_id).is_accepted
    assert job.incidents()[-1].evidence == ("rank 0 ended with exit code 74 (save failed)",)


def test_requests_about_no_round_or_host_are_refused() -> None:
    job = begin(up=0)
    for kind, host in [(RequestKind.CHECKPOINT, ""), (RequestKind.EVICT, "unknown"), (RequestKind.CHECK, "unknown")]:
        request_id = job.ask(kind, host)
        job.go_on(0.2)
        assert (job.answer(request_id).is_accepted, job.answer(request_id).is_done) == (False, True)
        assert KEYS.request(request_id) not in job.etcd.items


def test_damaged_keys_are_reported_and_survived() -> None:
    job = begin()
    job.etcd.put(KEYS.host("host-9"), b"{")
    job.etcd.put(KEYS.status("host-0"), b'{"schema_version":7}')
    job.etcd.put(f"{KEYS.prefix}rounds/nonsense", b"{}")
    job.etcd.put(f"{KEYS.prefix}evidence/1", b"{}")
    job.etcd.put(KEYS.report, encode(DriverReport("x", "", 0.0)))
    job.driver.read_log(1000, job.now)
    decision = job.driver.decide(job.now)
    assert [action.topic for action in decision.actions if hasattr(action, "topic")] == ["damaged"]
    assert writes_of(decision.actions, KEYS).operations == ()
    assert "train" in decision.reason


def test_same_state_gives_the_same_decision() -> None:
    job = begin()
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    job.driver.read_log(1000, job.now)
    assert decide(job.now, job.driver.state, POLICY) == decide(job.now, job.driver.state, POLICY)
