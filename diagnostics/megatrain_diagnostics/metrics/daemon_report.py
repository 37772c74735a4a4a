"""Reports in etcd what the daemon receives and what is wrong: every reader of the job's health uses it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Protocol

from megatrain.contracts.diag_records import DaemonRecord, DaemonReport, DeviceTrouble
from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.record import encode
from megatrain.contracts.texts import ranges_text
from megatrain.coordination.client import EtcdClient
from megatrain.jobs.reasons.diagnosis import REPORT_S
from megatrain.jobs.snapshot import JobSnapshot
from megatrain_diagnostics.collector.counters import Ledger
from megatrain_diagnostics.metrics.job_book import JobBook
from megatrain_diagnostics.metrics.job_metrics import Judge

_logger = logging.getLogger(__name__)
_WRITE_S = 2.0
_GRACE_S = 15.0
"""So long the hosts may take to find a daemon that has just begun."""
_MOST_HOSTS = 32
_MOST_TEXT = 200
_MOST_DEVICES = 16
_MOST_DEVICE_TEXT = 300


class DeviceJudge(Protocol):
    """What the report asks of whoever watches devices."""

    def troubles(self, connected: Collection[str]) -> tuple[DeviceTrouble, ...]:
        """Return what is wrong, the worst first. `connected`: hosts whose streamers are connected."""


def away_hosts(snapshot: JobSnapshot | None, connected: Iterable[str]) -> tuple[str, ...]:
    """Return the hosts of the newest round that run a streamer and have no stream open, by rank."""
    newest = None if snapshot is None else snapshot.newest_round
    if snapshot is None or newest is None:
        return ()
    there = set(connected)
    told = [(part.host, snapshot.status_of(part.host, part.session)) for part in newest.hosts]
    return tuple(host for host, status in told if status is not None and status.is_streamed and host not in there)


class DaemonReporter:
    """Writes what is new, and every few seconds in any case. For one thread; an etcd that is away stops nothing."""

    def __init__(
        self,
        client: EtcdClient,
        keys: JobKeys,
        record: DaemonRecord,
        sources: tuple[Judge, Ledger, JobBook, DeviceJudge],
        trouble: Callable[[], str],
        snapshot: Callable[[], JobSnapshot | None],
    ) -> None:
        """`record`: of this daemon; `trouble`: why nothing can be stored, empty when all is well."""
        self._client, self._keys, self._record = client, keys, record
        self._judge, self._ledger, self._book, self._devices = sources
        self._trouble, self._snapshot = trouble, snapshot
        self._told: DaemonReport | None = None

    def tell(self, now_s: float) -> bool:
        """Write the report where it is time to; return whether it was written. Units: unix seconds."""
        report, told = self._report(now_s), self._told
        if told is not None and not _is_due(told, report):
            return False
        try:
            self._client.put(self._keys.daemon_report, encode(report), deadline_s=_WRITE_S)
        except CoordinationError as error:
            _logger.debug("the daemon's report cannot be written: %s", error)
            return False
        self._told = report
        return True

    def _trains(self, host: str) -> bool:
        """Whether a host is in the newest round: what is wrong with others their own checks tell."""
        snapshot = self._snapshot()
        newest = None if snapshot is None else snapshot.newest_round
        return newest is None or any(part.host == host for part in newest.hosts)

    def _report(self, now_s: float) -> DaemonReport:
        away: tuple[str, ...] = ()
        if now_s - self._record.started_unix_s > _GRACE_S:
            away = away_hosts(self._snapshot(), self._ledger.counters().connected)
        silent = self._judge.silent_ranks()
        devices = [one for one in self._devices.troubles(self._ledger.counters().connected) if self._trains(one.host)]
        return DaemonReport(
            session=self._record.session,
            at_unix_s=now_s,
            trouble=self._trouble(),
            heard_unix_s=self._book.reading(self._keys.job, "").last_step_unix_s,
            silent_ranks=ranges_text(silent)[:_MOST_TEXT],
            num_silent_ranks=len(silent),
            away_hosts=away[:_MOST_HOSTS],
            num_away_hosts=len(away),
            devices=tuple(replace(one, text=one.text[:_MOST_DEVICE_TEXT]) for one in devices[:_MOST_DEVICES]),
            num_device_troubles=len(devices),
        )


def _is_due(told: DaemonReport, now: DaemonReport) -> bool:
    # temperatures and clocks are never twice the same: which devices are in trouble is the news
    devices = told.devices if _devices_of(told) == _devices_of(now) else now.devices
    same = replace(now, at_unix_s=told.at_unix_s, heard_unix_s=told.heard_unix_s, devices=devices)
    return same != told or not 0.0 <= now.at_unix_s - told.at_unix_s < REPORT_S


def _devices_of(report: DaemonReport) -> list[tuple[str, str, tuple[int, ...], float | None]]:
    return [(one.kind, one.host, one.ranks, one.since_unix_s) for one in report.devices]
