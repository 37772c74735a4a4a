"""The allowed effects of an outage of a network or of etcd on a job of two hosts, and its behavior afterwards.

Several outages may occur in one job: each is compared with the state before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatrain.contracts.records.host_records import HostPhase
from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState
from megatrain.contracts.records.rounds import Round
from tests.helpers.outage_job import OutageJob, outage_job
from tests.helpers.waiting import wait_until

TTL_S = 4
LONG_S = 2.0 * TTL_S
QUICK: Mapping[str, Mapping[str, Any]] = {
    "recovery": {
        # The lower bound of the learned timeout is above ten times the median step.
        "lease_ttl_s": TTL_S, "lease_renew_s": 1.0, "hang_floor_s": 3.5, "status_interval_s": 1.0,
        "restarts_per_hour": 100, "host_failures_per_hour": 100,
    }
}  # fmt: skip
RANK = 1
_PACE_S = 0.3
_LOADED_S = 2.0
"""The additional time of a step on a machine that others use."""


@contextmanager
def lasting_job(root: Path, **options: Any) -> Iterator[OutageJob]:
    """Run a job through outages; at the end, if no check failed, it saves and stops and leaves nothing behind."""
    with outage_job(root, QUICK, ranks_per_host=1, pace_s=_PACE_S, **options) as job:
        yield job
        job.end()


@dataclass(frozen=True, slots=True)
class Before:
    """The state of a job before an outage."""

    sessions: Mapping[str, str]
    driver: str
    round: Round
    num_recoveries: int
    num_holds: int

    @classmethod
    def of(cls, job: OutageJob) -> Self:
        wait_until(lambda: job.view.driver() in job.sessions(), "a driver")
        return cls(job.sessions(), job.view.driver(), job.view.rounds()[-1], len(job.recoveries()), len(job.holds()))

    @property
    def trainers(self) -> set[str]:
        return {part.host for part in self.round.hosts}

    @property
    def spares(self) -> set[str]:
        return set(self.sessions) - self.trainers

    def new_holds(self, job: OutageJob) -> list[Incident]:
        return job.holds()[self.num_holds :]


def check_no_host_was_evicted(job: OutageJob, before: Before, since: float, *, num_recoveries: int = 0) -> None:
    """Check that all hosts return with their sessions, and that no step was delayed since then."""
    wait_until(job.is_registered_as(before.sessions), "all earlier sessions")
    wait_until(lambda: job.view.driver() in before.sessions, "a driver")
    job.wait_for_more_steps(8)
    median_s, longest_s = job.step_times(since)
    assert longest_s <= 3.0 * median_s + 1.0 + _LOADED_S
    assert len(job.view.rounds()) == before.round.number + num_recoveries
    assert len(job.recoveries()) == before.num_recoveries + num_recoveries


def check_next_fault_is_answered(job: OutageJob) -> None:
    """Check that the job still recovers from a fault: the outage has no lasting effect."""
    number, num_before = len(job.view.rounds()), len(job.recoveries())
    job.kill_a_rank(RANK)
    job.wait_for_round(number + 1)
    wait_until(
        lambda: len(job.recoveries()) > num_before and job.recoveries()[-1].state is IncidentState.RECOVERED,
        "the recovery",
    )
    assert len(job.recoveries()) == num_before + 1
    check_rank_was_named(job, job.recoveries()[-1])


def check_rank_was_named(job: OutageJob, incident: Incident) -> None:
    host = job.view.rounds()[incident.round - 1].host_of(RANK).host
    assert (incident.kind, incident.action) == (IncidentKind.FAILURE, "restart")
    assert (incident.culprit_ranks, incident.culprit_hosts) == ((RANK,), (host,))


def check_one_hold_that_is_over(job: OutageJob, before: Before) -> None:
    """Check that the outage is recorded once, as an incident that needed no action."""
    wait_until(lambda: any("over_unix_s" in one.notes for one in before.new_holds(job)), "the end of the hold")
    (hold,) = before.new_holds(job)
    assert set(hold.culprit_hosts) <= before.trainers
    assert hold.culprit_hosts


def wait_until_parked(job: OutageJob, host: str, stale: str) -> None:
    """Wait until a host that was cut off is a spare, with another session than `stale`."""
    wait_until(lambda: job.phase_of(host) is HostPhase.PARKED and host in job.sessions(), f"{host} as a spare")
    assert job.sessions()[host] != stale
    assert job.workers_of(host) == []
