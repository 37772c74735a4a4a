"""Runs this host's health checks, before it takes part and on request, one at a time in a separate thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from megatrain.contracts.records.host_records import CheckOutcome, CheckReport, CheckResult
from megatrain.contracts.records.rounds import HostCommand
from megatrain_launcher.executor.membership import FitnessCheck, Membership

_logger = logging.getLogger(__name__)
JOIN_CHECK = "join"
"""The report id of the checks that a host runs before it takes part."""
_AGAIN_S = 300.0
"""Interval of repeated checks of an unfit host that does not train; the problem may have been fixed."""


class HealthChecks(Protocol):
    """The checks that the queue runs. A call may take minutes."""

    def check(self, session: str, is_training: bool) -> CheckReport:
        """Run all checks of this host; skip the timed ones while it trains."""

    def check_pair(self, session: str, command: HostCommand) -> CheckReport:
        """Run the timed all-reduce with the partner that the command names."""


class CheckQueue:
    """Runs the requested checks, in order, until `close`.

    `publish` publishes a report under a report id; `is_training` returns whether this host trains.
    """

    def __init__(
        self,
        checks: HealthChecks,
        membership: Membership,
        publish: Callable[[str, CheckReport], None],
        is_training: Callable[[], bool],
        *,
        again_s: float = _AGAIN_S,
    ) -> None:
        self._checks = checks
        self._membership = membership
        self._publish = publish
        self._is_training = is_training
        self._again_s = again_s
        self._jobs: queue.SimpleQueue[tuple[HostCommand | None, Callable[[], None]] | None] = queue.SimpleQueue()
        # a daemon thread that is not joined: a check that hangs must not delay the executor's exit
        self._thread = threading.Thread(target=self._run, name="check queue", daemon=True)
        self._thread.start()

    def check_before_joining(self) -> None:
        """Queue the checks that must pass before the host takes part."""
        self._jobs.put((None, lambda: None))

    def obey(self, command: HostCommand, on_done: Callable[[], None]) -> None:
        """Queue the checks that a command requests; `on_done` is called after `publish` got their report."""
        self._jobs.put((command, on_done))

    def close(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            command, on_done = job
            if command is not None and command.partners:
                self._publish(command.request, self._report(partial(self._pair, command)))
            else:
                self._check(JOIN_CHECK if command is None else command.request)
            on_done()

    def _next(self) -> tuple[HostCommand | None, Callable[[], None]] | None:
        """Wait for the next request. Without one, repeat the checks of an unfit host every `again_s` seconds."""
        while True:
            try:
                return self._jobs.get(timeout=self._again_s)
            except queue.Empty:
                if self._membership.unfit_reason(FitnessCheck.HEALTH) and not self._is_training():
                    return None, lambda: None

    def _pair(self, command: HostCommand) -> CheckReport:
        return self._checks.check_pair(self._membership.session, command)

    def _all(self) -> CheckReport:
        return self._checks.check(self._membership.session, self._is_training())

    def _report(self, check: Callable[[], CheckReport]) -> CheckReport:
        """Return the report of checks. If they raise an error, the report has a failed check."""
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
            record = self._membership.record
            return CheckReport(record.host, record.session, began, (result,))

    def _check(self, check_id: str) -> None:
        report = self._report(self._all)
        self._publish(check_id, report)
        reason = "; ".join(f"{result.name}: {result.detail}" for result in report.failed)
        if self._membership.set_unfit_reason(FitnessCheck.HEALTH, reason):
            if reason:
                _logger.error("this host is not fit to take part: %s", reason)
            else:
                _logger.info("this host has passed its checks")
