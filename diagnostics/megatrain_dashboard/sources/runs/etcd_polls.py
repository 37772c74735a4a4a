"""Reads the state of many jobs from their etcds: a run's own etcd, or one that many jobs share. A call takes at most a
second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from megatrain.contracts.errors import ConfigError, CoordinationError, DataError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.formatting import names_text, short
from megatrain_dashboard.sources.runs.run_summary import RunSummary
from megatrain_job.commands.job_location import list_jobs
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.jobs.etcd_job import EtcdPoll
from megatrain_job.jobs.own_etcd import read_own_etcd
from megatrain_job.jobs.snapshot import DecodedRecords, read_job

_CALL_S = 1.0
"""The time that a call waits for etcd, the same as in `megatrain status`."""
_MAX_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """The address and the credentials of a job's etcd."""

    settings: EtcdSettings
    job: str


class PolledJob:
    """One job that is read repeatedly, by one thread at a time."""

    def __init__(self, access: EtcdAccess, client: EtcdClient, clock: Callable[[], float] = time.time) -> None:
        self.client = client
        self._keys, self._clock = JobKeys(access.job), clock
        self._decoded = DecodedRecords()
        self._last = EtcdPoll()

    def poll(self) -> EtcdPoll:
        """Return the job's current state in etcd; where etcd does not answer, the last state with the reason."""
        try:
            snapshot = read_job(self.client, self._keys, decoded=self._decoded)
        except CoordinationError as error:
            return self.unreachable_poll(error)
        self._last = EtcdPoll(snapshot, at_unix_s=self._clock())
        return self._last

    def unreachable_poll(self, error: CoordinationError) -> EtcdPoll:
        """Return the last state with the reason why etcd does not answer."""
        self._last = replace(self._last, problem=short(str(error), _MAX_CHARACTERS))
        return self._last


class SharedEtcd:
    """All jobs of one etcd."""

    def __init__(self, settings: EtcdSettings, pool: Executor, clock: Callable[[], float] = time.time) -> None:
        self._settings, self._pool, self._clock = settings, pool, clock
        self._client = EtcdClient(with_short_timeouts(settings))
        self._jobs: dict[str, PolledJob] = {}

    def poll_all(self) -> tuple[dict[EtcdAccess, EtcdPoll], str]:
        """Return all jobs and an empty text; if etcd does not list its jobs, the last known jobs and the reason."""
        where = names_text([str(endpoint) for endpoint in self._settings.endpoints])
        try:
            names = list_jobs(self._client)
        except CoordinationError as error:
            found = {name: job.unreachable_poll(error) for name, job in self._jobs.items()}
            problem = f"etcd at {where} cannot list its jobs: {short(str(error), _MAX_CHARACTERS)}"
            return self._by_access(found), problem
        self._jobs = {
            name: self._jobs.get(name) or PolledJob(EtcdAccess(self._settings, name), self._client, self._clock)
            for name in names
        }
        polls = self._pool.map(lambda job: job.poll(), self._jobs.values())
        return self._by_access(dict(zip(self._jobs, polls, strict=True))), ""

    def close(self) -> None:
        self._client.close()

    def _by_access(self, polls: dict[str, EtcdPoll]) -> dict[EtcdAccess, EtcdPoll]:
        return {EtcdAccess(self._settings, name): poll for name, poll in polls.items()}


def own_etcd_access(summary: RunSummary | None) -> EtcdAccess | None:
    """Return how to reach a run's own etcd, if its launch is alive and the run belongs to this user.

    A held lock proves that a launch is alive. A run directory of another user must not make the list query
    a server.
    """
    if summary is None or not summary.facts.is_held:
        return None
    try:
        own = read_own_etcd(summary.root)
    except (OSError, DataError, ConfigError):
        return None  # the run is another user's, or its etcd is starting, or it uses an etcd elsewhere
    return EtcdAccess(own.settings, own.job)


def with_short_timeouts(settings: EtcdSettings) -> EtcdSettings:
    """Return settings with short timeouts."""
    return replace(settings, attempt_s=_CALL_S, call_s=_CALL_S)
