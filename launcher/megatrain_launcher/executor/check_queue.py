"""Health checks of this host: before it takes part and on request, one at a time, in a separate thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from megatrain.contracts.records.host_records import CheckOutcome, CheckReport, CheckResult
from megatrain.contracts.records.rounds import HostCommand
from megatrain_launcher.executor.membership import FitnessCheck, Membership

_logger = logging.getLogger(__name__)
JOIN_CHECK = "join"
"""Id of the report of the checks that a host runs before it takes part."""
_AGAIN_S = 300.0
"""How often an unfit host that does not train is checked again: clocks may have been set, disks emptied."""


class HealthChecks(Protocol):
    """The available checks. The calls may take minutes."""

    def check(self, session: str, is_training: bool) -> CheckReport:
        """Run all checks of this host; while it trains, the timed ones are skipped."""

    def check_pair(self, session: str, command: HostCommand) -> CheckReport:
        """Run the timed all-reduce with the partner that a command names."""


@dataclass(frozen=True, slots=True)
class CheckQueueParts:
    checks: HealthChecks
    membership: Membership
    publish: Callable[[str, CheckReport], None]
    """Publishes a report under the id of the request for it."""
    is_training: Callable[[], bool]


class CheckQueue:
    """Runs the requested checks, in order, until `close`."""

    def __init__(self, parts: CheckQueueParts, *, again_s: float = _AGAIN_S) -> None:
        self._parts = parts
        self._again_s = again_s
        self._jobs: queue.SimpleQueue[tuple[HostCommand | None, Callable[[], None]] | None] = queue.SimpleQueue()
        # not joined at the end: a check that hangs must not keep the host
        self._thread = threading.Thread(target=self._run, name="check queue", daemon=True)
        self._thread.start()

    def check_before_joining(self) -> None:
        """Queue the checks that must pass before the host takes part."""
        self._jobs.put((None, lambda: None))

    def obey(self, command: HostCommand, on_done: Callable[[], None]) -> None:
        """Run what a command asks for; calls `on_done` when the report is published."""
        self._jobs.put((command, on_done))

    def close(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            command, on_done = job
            if command is not None and command.partners:
                self._parts.publish(command.request, self._report(partial(self._pair, command)))
            else:
                self._check(JOIN_CHECK if command is None else command.request)
            on_done()

    def _next(self) -> tuple[HostCommand | None, Callable[[], None]] | None:
        """Wait for a request; return the previous checks if they failed and no request arrives for long."""
        while True:
            try:
                return self._jobs.get(timeout=self._again_s)
            except queue.Empty:
                if self._parts.membership.unfit_reason(FitnessCheck.HEALTH) and not self._parts.is_training():
                    return None, lambda: None

    def _pair(self, command: HostCommand) -> CheckReport:
        return self._parts.checks.check_pair(self._parts.membership.session, command)

    def _all(self) -> CheckReport:
        return self._parts.checks.check(self._parts.membership.session, self._parts.is_training())

    def _report(self, check: Callable[[], CheckReport]) -> CheckReport:
        """Return what checks report; checks that fail themselves count as a failure of this host."""
        began = time.time()
        try:
            return check()
        except Exception as error:  # any error: a host that cannot be checked must not train
            _logger.exception("the health checks of this host could not be run")
            result = CheckResult(
                "checks",
                CheckOutcome.FAILED,
                f"could not be run: {type(error).__name__}: {error}",
                time.time() - began,
            )
            record = self._parts.membership.record
            return CheckReport(record.host, record.session, began, (result,))

    def _check(self, check_id: str) -> None:
        report = self._report(self._all)
        self._parts.publish(check_id, report)
        reason = "; ".join(f"{result.name}: {result.detail}" for result in report.failed)
        if self._parts.membership.set_unfit_reason(FitnessCheck.HEALTH, reason):
            if reason:
                _logger.error("this host is not fit to take part: %s", reason)
            else:
                _logger.info("this host has passed its checks")
