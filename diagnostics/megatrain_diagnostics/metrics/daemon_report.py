"""Writes the daemon's report to etcd: silent ranks, missing hosts, devices with problems. Job health is based on it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Protocol

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.diag_records import DaemonRecord, DaemonReport, DeviceProblem
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain.formatting import ranges_text
from megatrain_diagnostics.collector.counters import IngestStatistics
from megatrain_diagnostics.metrics.job_metrics import AssessmentSource
from megatrain_diagnostics.metrics.training_metrics import TrainingMetrics
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.jobs.reasons.diagnosis import REPORT_S
from megatrain_job.jobs.snapshot import JobSnapshot

_logger = logging.getLogger(__name__)
_WRITE_S = 2.0
_GRACE_S = 15.0
"""Time for hosts to find and connect to a daemon that has just started."""
_MAX_HOSTS = 32
_MAX_TEXT = 200
_MAX_DEVICES = 16
_MAX_DEVICE_TEXT = 300


class DeviceProblemSource(Protocol):
    """The part of DeviceWatch that the report uses."""

    def problems(self, connected: Collection[str]) -> tuple[DeviceProblem, ...]:
        """Return the problems, the worst first. `connected`: hosts with a connected streamer."""


def disconnected_hosts(snapshot: JobSnapshot | None, connected: Iterable[str]) -> tuple[str, ...]:
    """Return the hosts of the newest round that run a streamer but have no open stream, in the order of ranks."""
    newest = None if snapshot is None else snapshot.newest_round
    if snapshot is None or newest is None:
        return ()
    there = set(connected)
    statuses = [(part.host, snapshot.status_of(part.host, part.session)) for part in newest.hosts]
    return tuple(host for host, status in statuses if status is not None and status.is_streamed and host not in there)


class DaemonReporter:
    """Writes the report when it changes, and at least every few seconds. For one thread; etcd may be unavailable."""

    def __init__(
        self,
        client: EtcdClient,
        keys: JobKeys,
        record: DaemonRecord,
        sources: tuple[AssessmentSource, IngestStatistics, TrainingMetrics, DeviceProblemSource],
        problem: Callable[[], str],
        snapshot: Callable[[], JobSnapshot | None],
    ) -> None:
        """`record`: the record of this daemon; `problem`: returns why nothing can be stored, "" when storing works."""
        self._client, self._keys, self._record = client, keys, record
        self._judge, self._statistics, self._training, self._devices = sources
        self._problem, self._snapshot = problem, snapshot
        self._written: DaemonReport | None = None

    def write(self, now_s: float) -> bool:
        """Write the report when it is due; return whether it was written. Units: unix seconds."""
        report, written = self._report(now_s), self._written
        if written is not None and not _is_due(written, report):
            return False
        try:
            self._client.put(self._keys.daemon_report, encode(report), deadline_s=_WRITE_S)
        except CoordinationError as error:
            _logger.debug("the daemon's report cannot be written: %s", error)
            return False
        self._written = report
        return True

    def _trains(self, host: str) -> bool:
        """Return whether a host is in the newest round: problems of other hosts are reported by health checks."""
        snapshot = self._snapshot()
        newest = None if snapshot is None else snapshot.newest_round
        return newest is None or any(part.host == host for part in newest.hosts)

    def _report(self, now_s: float) -> DaemonReport:
        away: tuple[str, ...] = ()
        if now_s - self._record.started_unix_s > _GRACE_S:
            away = disconnected_hosts(self._snapshot(), self._statistics.counters().connected)
        silent = self._judge.silent_ranks()
        devices = [
            problem
            for problem in self._devices.problems(self._statistics.counters().connected)
            if self._trains(problem.host)
        ]
        return DaemonReport(
            session=self._record.session,
            at_unix_s=now_s,
            problem=self._problem(),
            newest_step_unix_s=self._training.reading(self._keys.job, "").last_step_unix_s,
            silent_ranks=ranges_text(silent)[:_MAX_TEXT],
            num_silent_ranks=len(silent),
            away_hosts=away[:_MAX_HOSTS],
            num_away_hosts=len(away),
            devices=tuple(replace(device, text=device.text[:_MAX_DEVICE_TEXT]) for device in devices[:_MAX_DEVICES]),
            num_device_problems=len(devices),
        )


def _is_due(written: DaemonReport, now: DaemonReport) -> bool:
    # temperatures and clocks in the texts change at every reading: compare only which devices have which problems
    devices = written.devices if _devices_of(written) == _devices_of(now) else now.devices
    same = replace(now, at_unix_s=written.at_unix_s, newest_step_unix_s=written.newest_step_unix_s, devices=devices)
    return same != written or not 0.0 <= now.at_unix_s - written.at_unix_s < REPORT_S


def _devices_of(report: DaemonReport) -> list[tuple[str, str, tuple[int, ...], float | None]]:
    return [(device.kind, device.host, device.ranks, device.since_unix_s) for device in report.devices]
