"""A running job, read from etcd and from its run directory. One thread polls each, and a third watches checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from megatrain.config.config import Config
from megatrain.config.serialize import config_of_values
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.formatting import age_text
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.sources.facts import JobFacts
from megatrain_dashboard.sources.run_history import PERIOD_S
from megatrain_dashboard.sources.run_source import RunSource, checkpoints_place
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.jobs.etcd_job import MAX_PAUSE_S, EtcdJob, EtcdPoll
from megatrain_job.jobs.snapshot import JobSnapshot
from megatrain_job.jobs.verdict_cases import merged_cases


class LiveJob(RunSource):
    """A JobSource. Its constructor starts the threads; `close` ends them and leaves the client of etcd open."""

    def __init__(
        self,
        client: EtcdClient,
        keys: JobKeys,
        run: RunDirectory,
        *,
        clock: Callable[[], float] = time.time,
        period_s: float = PERIOD_S,
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        """Open the job.

        period_s: the time between two polls of the run directory. max_pause_s: the longest time between two reads of
        etcd while no change is reported.
        """
        self._keys, self._clock = keys, clock
        self._config: Config | None = None
        self._etcd_endpoints = ",".join(map(str, client.settings.endpoints))
        super().__init__(run, lambda: checkpoints_place(self._config, run), is_over=False, period_s=period_s)
        self._etcd = EtcdJob(client, keys, self._take, clock=clock, max_pause_s=max_pause_s)

    @property
    def job(self) -> str:
        return self._keys.job

    @property
    def is_recorded(self) -> bool:
        return False

    @property
    def etcd_endpoints(self) -> str:
        return self._etcd_endpoints

    def snapshot(self) -> JobSnapshot | None:
        return self._etcd.last_poll.snapshot

    def etcd_problem(self) -> str:
        poll = self._etcd.last_poll
        if not poll.problem:
            return ""
        if poll.snapshot is None:
            return f"etcd is out of reach, and the state of the job is not known: {poll.problem}"
        age = age_text(poll.at_unix_s, self._clock())
        return f"etcd is out of reach; the state of hosts and rounds shown here is {age} old: {poll.problem}"

    def facts(self) -> JobFacts:
        on_disk, poll = super().facts(), self._etcd.last_poll
        found = {incident.incident_id: incident for incident in on_disk.incidents}
        if poll.snapshot is not None:
            of_etcd = (*poll.snapshot.earlier_incidents, *poll.snapshot.incidents)
            found.update({incident.incident_id: incident for incident in of_etcd})
        return replace(
            on_disk,
            incidents=tuple(found[name] for name in sorted(found)),
            damaged_incidents={name: why for name, why in on_disk.damaged_incidents.items() if name not in found},
            cases=tuple(merged_cases(on_disk.cases, poll.records.cases)),
            checks=poll.records.checks,
            evidence=poll.records.evidence,
            config=self._config,
            is_daemon_alive=None if poll.problem else poll.snapshot is not None and bool(poll.snapshot.daemon_session),
            problems=(*on_disk.problems, *poll.records.unreadable),
        )

    def close(self) -> None:
        self._etcd.close()
        super().close()

    def _take(self, before: EtcdPoll, now: EtcdPoll) -> None:
        """Raise the versions of the topics that a poll of etcd has changed."""
        old, new = before.snapshot, now.snapshot
        if new is not None and (old is None or old.record != new.record):
            self._config = _config_of(new)
        topics = {"overview"}
        if old is None or new is None or replace(old, revision=0) != replace(new, revision=0):
            topics |= {"hosts", "ranks"}
        if old is None or new is None or old.incidents != new.incidents:
            topics.add("incidents")
        if before.records != now.records:
            topics |= {"incidents", "hosts"}
        self._versions.bump(*topics)


def _config_of(snapshot: JobSnapshot) -> Config | None:
    record = snapshot.record
    if record is None or not record.config:
        return None
    try:
        return config_of_values(record.config, record.job)
    except ConfigError:
        return None  # another version of this program wrote the record; the daemon reports this too
