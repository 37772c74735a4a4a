"""Sequences of events in a simulated job for tests of the driver: hosts obey, the driver sees everything at once, time
passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatrain.contracts.records.host_records import HostPhase, Stall
from megatrain.contracts.records.incident import Incident
from megatrain.contracts.records.job_requests import Answer, JobRequest, RequestKind
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import Halt, JobEnd
from megatrain_launcher.driver.policy import Policy
from tests.helpers.simulated_etcd import KEYS
from tests.helpers.simulated_job import SimulatedJob

POLICY = Policy(min_hosts=2, max_hosts=2, num_workers=2, feasible_counts={2: 1}, join_timeout_s=60.0)
ELASTIC = replace(POLICY, min_hosts=1, feasible_counts={1: 2, 2: 1}, shrink_after_s=30.0)
APPROVAL = replace(POLICY, eviction="approval")
DRY_RUN = replace(POLICY, eviction="dry-run")


def begin(policy: Policy = POLICY, num_hosts: int = 3, up: int | None = None) -> SimulatedJob:
    """Return a job that trains, unless there are too few hosts."""
    job = SimulatedJob(policy, num_hosts)
    for host in list(job.hosts.values())[: num_hosts if up is None else up]:
        host.start(job.now)
    go_on(job, 3.0)
    return job


def go_on(job: SimulatedJob, seconds: float, *, step_s: float = 0.1) -> None:
    end = job.now + seconds
    while job.now < end:
        job.now += step_s
        for host in job.hosts.values():
            host.read_log(1000)
            host.act(job.now)
        drive(job)


def drive(job: SimulatedJob) -> None:
    """Let only the driver receive events and decide."""
    job.driver.read_log(1000, job.now)
    job.probe(job.driver.decide(job.now))
    job.check()


def go_on_until(job: SimulatedJob, is_met: Callable[[], bool], limit_s: float, *, step_s: float = 0.1) -> float:
    begin_s = job.now
    while not is_met():
        assert job.now < begin_s + limit_s, job.driver.decide(job.now)
        go_on(job, step_s, step_s=step_s)
    return job.now - begin_s


def records_of(job: SimulatedJob, kind: type, directory: str) -> list:
    prefix = KEYS.directory(directory)
    return [decode(kind, job.etcd.items[key].value, key) for key in sorted(job.etcd.items) if key.startswith(prefix)]


def incidents(job: SimulatedJob) -> list[Incident]:
    return records_of(job, Incident, "incidents")


def members(job: SimulatedJob, number: int) -> list[str]:
    return [part.host for part in job.rounds()[number].hosts]


def ended(job: SimulatedJob) -> JobEnd | None:
    item = job.etcd.items.get(KEYS.end)
    return None if item is None else decode(JobEnd, item.value, "end")


def halted(job: SimulatedJob, number: int) -> Halt:
    return decode(Halt, job.etcd.items[KEYS.halt(number)].value, "halt")


def ask(job: SimulatedJob, kind: RequestKind, host: str = "") -> str:
    request_id = f"q{len(job.etcd.log)}"
    job.etcd.put(KEYS.request(request_id), encode(JobRequest(request_id, kind, "me@here", host)))
    return request_id


def answer(job: SimulatedJob, request_id: str) -> Answer:
    return decode(Answer, job.etcd.items[KEYS.answer(request_id)].value, "answer")


def say_done(job: SimulatedJob, *names: str) -> None:
    for name in names:
        host = job.hosts[name]
        host.running, host.phase = 0, HostPhase.DONE
        host.write_status(job.now)


def stall(job: SimulatedJob, *names: str) -> None:
    for name in names:
        host = job.hosts[name]
        host.stall = Stall("step", host.step, 5.0, 5.0, job.now, (0,))
        host.write_status(job.now)


def goes_on(job: SimulatedJob, number: int) -> Callable[[], bool]:
    """Return a condition: whether round `number` trains."""
    return lambda: number in job.rounds() and job.is_training()
