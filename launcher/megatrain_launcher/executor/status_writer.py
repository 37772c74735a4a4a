"""Writes this host's status under its lease: at once after an important change, else every few seconds.

Values that change with every step (steps, their times, the phase of the slowest rank), problems and the space of disks
wait for the next regular write. Queued evidence and reports are written before the next status. While etcd cannot be
reached, no statuses are queued; the newest one is written later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.host_records import CheckReport, HangEvidence, HostStatus
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.own_keys import OwnKeys
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_launcher.executor.membership import Membership

_logger = logging.getLogger(__name__)
_AGAIN_S = 0.25
_WRITE_S = 3.0
"""Time limit for one write; after it, a newer status is written instead."""


def is_news(before: HostStatus | None, now: HostStatus) -> bool:
    """Return whether a status differs from the previous one in a value that must be published at once."""
    return before is None or _without_routine(before) != _without_routine(now)


def _without_routine(status: HostStatus) -> HostStatus:
    return replace(
        status,
        min_step=None,
        max_step=None,
        last_step_unix_s=None,
        median_step_s=None,
        interval_s=None,
        stop_s=None,
        save_interval_s=None,
        step_phase="",
        problem="",
        disks=(),
    )


@dataclass(frozen=True, slots=True)
class _Written:
    status: HostStatus
    lease_id: int
    at: float


class StatusWriter:
    """A thread that writes status, evidence and check reports until `close`. `build` returns the current status."""

    def __init__(
        self,
        client: EtcdClient,
        keys: JobKeys,
        membership: Membership,
        build: Callable[[], HostStatus],
        interval_s: float,
    ) -> None:
        self._own = OwnKeys(client)
        self._keys = keys
        self._membership = membership
        self._build = build
        self._interval_s = interval_s
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._evidence: dict[int, HangEvidence] = {}
        self._reports: list[tuple[str, CheckReport]] = []
        self._written: _Written | None = None
        self._logged_problem = ""
        self._thread = RestartingThread("status writer", self._run, self._closed)

    def wake(self) -> None:
        """Check now whether there is anything to write."""
        self._wake.set()

    def add_evidence(self, evidence: HangEvidence) -> None:
        """Queue evidence, to be written before the next status."""
        with self._lock:
            self._evidence[evidence.round] = evidence
        self._wake.set()

    def add_report(self, check_id: str, report: CheckReport) -> None:
        """Queue a report of health checks, to be written under the lease."""
        with self._lock:
            self._reports.append((check_id, report))
        self._wake.set()

    def close(self) -> None:
        """Write the pending items a last time, if etcd responds, and stop the thread."""
        self._closed.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = self._interval_s
        while True:
            self._wake.wait(pause_s)
            self._wake.clear()
            is_last = self._closed.is_set()
            pause_s = self._write_all()
            if is_last:
                return

    def _write_all(self) -> float:
        """Write the pending items, and the status if it is due; return the seconds until the next try.

        The status is written even if etcd refuses the pending items.
        """
        try:
            self._write_pending()
            is_all_written = True
        except CoordinationError as error:
            self._log_problem(f"evidence or a report is not written: {error}")
            is_all_written = False
        try:
            pause_s = self._write_status()
        except CoordinationError as error:
            _logger.debug("status is not written: %s", error)
            return _AGAIN_S
        return pause_s if is_all_written else min(pause_s, _AGAIN_S)

    def _log_problem(self, problem: str) -> None:
        level = logging.DEBUG if problem == self._logged_problem else logging.WARNING
        self._logged_problem = problem
        _logger.log(level, "%s", problem)

    def _write_pending(self) -> None:
        """Write pending evidence and reports. Raises: CoordinationError; items that were not written stay pending."""
        for number, evidence in self._pending_evidence():
            key = self._keys.evidence(number, evidence.host)
            self._own.put(key, encode(evidence), deadline_s=_WRITE_S)
            with self._lock:
                if self._evidence.get(number) is evidence:
                    del self._evidence[number]
        while self._reports:
            check_id, report = self._reports[0]
            lease_id = self._membership.keeper.lease_id
            key = self._keys.check(check_id, report.host)
            self._own.put(key, encode(report), lease_id=lease_id, deadline_s=_WRITE_S)
            self._own.forget(key)
            with self._lock:
                self._reports.pop(0)

    def _pending_evidence(self) -> list[tuple[int, HangEvidence]]:
        with self._lock:
            return sorted(self._evidence.items())

    def _write_status(self) -> float:
        """Write the status if it is due; return the seconds until the next try. Raises: CoordinationError."""
        if not self._membership.is_registered:
            return _AGAIN_S
        lease_id = self._membership.keeper.lease_id
        status, written, now = self._build(), self._written, time.monotonic()
        is_due = written is None or written.lease_id != lease_id or is_news(written.status, status)
        left_s = 0.0 if written is None else written.at + self._interval_s - now
        if not is_due and left_s > 0:
            return left_s
        self._own.put(self._keys.status(status.host), encode(status), lease_id=lease_id, deadline_s=_WRITE_S)
        self._written = _Written(status, lease_id, now)
        return self._interval_s
