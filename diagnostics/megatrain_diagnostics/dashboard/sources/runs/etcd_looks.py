"""Looking at many jobs through their etcds: one of a run's own, or one that many share. A call takes a second at most."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from megatrain.commands.job_place import list_jobs
from megatrain.contracts.errors import ConfigError, CoordinationError, DataError
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.texts import names_text, short
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.settings import EtcdSettings
from megatrain.jobs.etcd_job import EtcdLook
from megatrain.jobs.own_etcd import read_own_etcd
from megatrain.jobs.snapshot import DecodedRecords, read_job
from megatrain_diagnostics.dashboard.sources.runs.glance import RunGlance

_CALL_S = 1.0
"""For etcd to answer, as `megatrain status` waits."""
_MOST_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Reach:
    """How a job's etcd is reached."""

    settings: EtcdSettings
    job: str


class OneJob:
    """One job, looked at over and over. For one thread at a time."""

    def __init__(self, reach: Reach, client: EtcdClient, clock: Callable[[], float] = time.time) -> None:
        self.client = client
        self._keys, self._clock = JobKeys(reach.job), clock
        self._decoded = DecodedRecords()
        self._last = EtcdLook()

    def look(self) -> EtcdLook:
        """Return the job's present state in etcd; where etcd does not answer, the last one, with the reason."""
        try:
            snapshot = read_job(self.client, self._keys, decoded=self._decoded)
        except CoordinationError as error:
            return self.out_of_reach(error)
        self._last = EtcdLook(snapshot, at_unix_s=self._clock())
        return self._last

    def out_of_reach(self, error: CoordinationError) -> EtcdLook:
        """Return the last answer, now that etcd does not answer."""
        self._last = replace(self._last, trouble=short(str(error), _MOST_CHARACTERS))
        return self._last


class SharedEtcd:
    """All jobs of one etcd."""

    def __init__(self, settings: EtcdSettings, pool: Executor, clock: Callable[[], float] = time.time) -> None:
        self._settings, self._pool, self._clock = settings, pool, clock
        self._client = EtcdClient(hasty(settings))
        self._jobs: dict[str, OneJob] = {}

    def looks(self) -> tuple[dict[Reach, EtcdLook], str]:
        """Return all jobs, and why etcd does not list them; earlier listed ones stay known."""
        where = names_text([str(endpoint) for endpoint in self._settings.endpoints])
        try:
            names = list_jobs(self._client)
        except CoordinationError as error:
            found = {name: job.out_of_reach(error) for name, job in self._jobs.items()}
            problem = f"etcd at {where} does not tell which jobs there are: {short(str(error), _MOST_CHARACTERS)}"
            return self._by_reach(found), problem
        self._jobs = {
            name: self._jobs.get(name) or OneJob(Reach(self._settings, name), self._client, self._clock) for name in names
        }
        looks = self._pool.map(lambda job: job.look(), self._jobs.values())
        return self._by_reach(dict(zip(self._jobs, looks, strict=True))), ""

    def close(self) -> None:
        self._client.close()

    def _by_reach(self, looks: dict[str, EtcdLook]) -> dict[Reach, EtcdLook]:
        return {Reach(self._settings, name): look for name, look in looks.items()}


def own_reach(glance: RunGlance | None) -> Reach | None:
    """Return how the etcd of a run's own is reached, where its launch lives and the run is this user's.

    A lock that is held proves that somebody lives: a run that one was sent must not have its list ask a server.
    """
    if glance is None or not glance.facts.is_held:
        return None
    try:
        told = read_own_etcd(glance.root)
    except (OSError, DataError, ConfigError):
        return None  # another user's, or it begins, or it was launched with an etcd elsewhere
    return Reach(told.settings, told.job)


def hasty(settings: EtcdSettings) -> EtcdSettings:
    """Return settings with which a call is over soon."""
    return replace(settings, attempt_s=_CALL_S, call_s=_CALL_S)
