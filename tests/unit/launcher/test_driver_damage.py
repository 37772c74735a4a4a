"""Unreadable keys where the driver must write: reported and skipped, without effect on a training round."""

from __future__ import annotations

from megatrain.contracts.records.host_records import HostPhase
from megatrain.contracts.records.incident import IncidentState
from megatrain.contracts.records.job_requests import RequestKind
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import HostCommand, JobRecord
from megatrain_launcher.driver.actions import Alarm
from tests.helpers.driver_story import POLICY, DriverStory, begin
from tests.helpers.simulated_etcd import KEYS

JUNK = b"{"


def alarms(job: DriverStory) -> list[str]:
    job.driver.read_log(1000, job.now)
    decision = job.driver.decide(job.now)
    assert decision is not None
    return [action.text for action in decision.actions if isinstance(action, Alarm)]


def test_unreadable_round_does_not_block_the_next() -> None:
    job = begin()
    job.etcd.put(KEYS.round(2), JUNK)
    job.etcd.put(KEYS.round(3), JUNK)
    assert any(KEYS.round(2) in text for text in alarms(job))
    job.go_on(1.0)
    assert KEYS.halt(1) not in job.etcd.items, "it trains on"
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    job.go_on_until(job.goes_on(4), 2.0)
    assert job.members(4) == job.members(1)
    assert job.halted(2).reason.startswith("round 2 cannot be read, and is replaced by a new round: ")
    assert job.etcd.items[KEYS.round(2)].value == JUNK, "left for a person to examine"


def test_host_that_left_a_later_round_is_not_awaited() -> None:
    job = begin(num_hosts=2)
    job.etcd.put(KEYS.round(2), JUNK)
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    job.drive()
    for host in job.hosts.values():  # as executors report after they have received the halts of rounds 1 and 2
        host.read_log(1000)
        host.running, host.phase, host.status_round = 0, HostPhase.PARKED, 2
        host.write_status(job.now)
    job.drive()
    job.drive()
    assert list(job.rounds()) == [1, 3]


def test_unreadable_first_round_is_replaced() -> None:
    job = DriverStory(POLICY, 2)
    job.etcd.put(KEYS.round(1), JUNK)
    job.driver.reread(job.now)
    for host in job.hosts.values():
        host.start(job.now)
    job.go_on_until(job.goes_on(2), 5.0)
    assert list(job.rounds()) == [2]
    assert {host.running for host in job.hosts.values()} == {2}


def test_overwritten_live_round_is_ended_first() -> None:
    job = begin()
    job.etcd.put(KEYS.round(1), JUNK)
    job.drive()
    assert job.halted(1).reason.startswith("round 1 cannot be read")
    for _ in range(5):
        job.drive()  # Its members are unknown: no host with workers is chosen.
    assert list(job.rounds()) == []
    job.go_on_until(job.goes_on(2), 5.0)


def test_unreadable_halt_keeps_no_round_alive() -> None:
    job = begin()
    job.etcd.put(KEYS.halt(1), JUNK)
    job.go_on(1.0)
    assert job.etcd.items[KEYS.halt(1)].value == JUNK
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    job.go_on_until(job.goes_on(2), 2.0)
    assert job.halted(1).incident


def test_unreadable_command_is_skipped() -> None:
    job = begin()
    job.etcd.put(KEYS.command(1), JUNK)
    job.ask(RequestKind.CHECKPOINT)
    job.go_on(0.3)
    del job.etcd.items[KEYS.command(1)]
    (command,) = job.records_of(HostCommand, "commands")
    assert (command.number, command.kind) == (2, "checkpoint")


def test_unreadable_end_has_no_effect() -> None:
    job = begin()
    job.etcd.put(KEYS.end, JUNK)
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    job.go_on_until(job.goes_on(2), 2.0)
    job.ask(RequestKind.STOP)
    job.go_on(1.0)
    assert job.end().exit_code == 0


def test_a_candidacy_without_a_lease_is_reported_and_removed() -> None:
    job = begin()
    stray = f"{KEYS.election}/stray"
    job.etcd.put(stray, b"me")
    assert any(f"{stray}: this election key has no lease, so it is not a candidacy" in text for text in alarms(job))
    assert stray not in job.etcd.items
    assert job.driver.key in job.etcd.items
    assert not alarms(job)


def test_failure_of_an_older_launch_does_not_count() -> None:
    job = begin()
    job.hosts["host-0"].fail(job.now, is_cascade=False, exit_code=78, label="user_code")  # a wrong configuration
    job.drive()
    for host in job.hosts.values():  # All records are gone before a driver has judged it.
        host.kill()
        host.lose_lease()
    record = JobRecord("sim", "again", "", {}, 2, 2, 2, "runs/sim", "host-0", job.now)
    job.etcd.put(KEYS.record, encode(record))
    job.change_driver()
    for host in job.hosts.values():
        host.start(job.now)
    job.go_on_until(job.goes_on(2), 5.0)
    job.go_on(1.0)
    assert not job.is_over()
    (incident,) = job.incidents()
    assert (incident.state, incident.next_round) == (IncidentState.STOPPED, None)
