"""The list of a host's health checks, and the code that runs each of them with a deadline.

Each check has a thread. If a check hangs, for example in a driver or file system, its thread is abandoned, and its
findings are failures or warnings, as the list of checks defines.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatrain.contracts.errors import MegatrainError
from megatrain.contracts.records.host_records import CheckOutcome, CheckReport, CheckResult
from megatrain_launcher.health import clock, gpus, kernel_log, limits, memory, network, storage, timed
from megatrain_launcher.health.context import HealthContext, HealthFinding, warning
from megatrain_launcher.health.history import HealthHistory, read_history, write_history

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Check:
    """One check and the names of its findings."""

    names: tuple[str, ...]
    run: Callable[[HealthContext, HealthHistory], Sequence[HealthFinding]]
    deadline_s: float
    is_needed: bool = True
    """Whether a host is unfit if this check gives no result by its deadline."""


CHECKS: tuple[Check, ...] = (
    Check(gpus.NAMES, gpus.check_gpus, gpus.DEADLINE_S),
    Check(kernel_log.NAMES, kernel_log.check_kernel_log, kernel_log.DEADLINE_S, is_needed=False),
    Check(storage.DISK_NAMES, storage.check_disk, storage.DEADLINE_S),
    Check(storage.SHARED_MEMORY_NAMES, storage.check_shared_memory, storage.DEADLINE_S),
    Check(memory.NAMES, memory.check_memory, memory.DEADLINE_S, is_needed=False),
    Check(limits.NAMES, limits.check_limits, limits.DEADLINE_S, is_needed=False),
    Check(clock.NAMES, clock.check_clock, clock.DEADLINE_S, is_needed=False),
    Check(network.NAMES, network.check_network, network.DEADLINE_S, is_needed=False),
    Check(timed.NAMES, timed.check_speed, timed.DEADLINE_S),
)


def run_checks(context: HealthContext, checks: Sequence[Check] = CHECKS) -> CheckReport:
    """Run all checks at the same time, store their measurements, and return the report, in the order of `checks`."""
    at_unix_s = time.time()
    history, problem = HealthHistory(), ""
    try:
        history, problem = read_history(context.history)
    except OSError as error:
        problem = f"{context.history} cannot be read: {error.strerror}"
    running = [_RunningCheck(check, context, history) for check in checks]
    results = [result for check in running for result in check.results()]
    problem = _remember(context, history, [check.findings for check in running]) or problem
    if problem:
        results.append(CheckResult("history", CheckOutcome.WARNING, problem, 0.0))
    return CheckReport(context.host, context.session, at_unix_s, tuple(results))


def _remember(context: HealthContext, history: HealthHistory, findings: Sequence[Sequence[HealthFinding]]) -> str:
    """Write the history with the new findings; return the error, empty if there was none."""
    newer = history.with_findings(finding for some in findings for finding in some)
    if newer == history:
        return ""
    try:
        write_history(context.history, newer)
    except OSError as error:
        return f"{context.history} cannot be written: {error.strerror}"
    return ""


class _RunningCheck:
    """One check, in a thread of its own."""

    def __init__(self, check: Check, context: HealthContext, history: HealthHistory) -> None:
        self._check = check
        self._began = time.monotonic()
        self._ended: float | None = None
        self._found: Sequence[HealthFinding] | None = None
        self.findings: Sequence[HealthFinding] = ()
        """The findings that arrived in time."""
        name = f"health-{check.names[0]}"
        self._thread = threading.Thread(target=self._run, args=(context, history), name=name, daemon=True)
        self._thread.start()

    def results(self) -> list[CheckResult]:
        """Wait for the check until its deadline, and return its results."""
        self._thread.join(max(0.0, self._began + self._check.deadline_s - time.monotonic()))
        is_late = self._thread.is_alive()
        found = self._found
        if is_late or found is None:
            outcome = CheckOutcome.FAILED if self._check.is_needed and is_late else CheckOutcome.WARNING
            detail = (
                f"no answer within {self._check.deadline_s:g} s" if is_late else "the check itself failed; see the log"
            )
            found = [HealthFinding(name, outcome, detail) for name in self._check.names]
        self.findings = found
        taken_s = (self._ended or time.monotonic()) - self._began
        return [
            CheckResult(finding.name, finding.outcome, finding.detail, taken_s, finding.value, finding.unit)
            for finding in found
        ]

    def _run(self, context: HealthContext, history: HealthHistory) -> None:
        try:
            self._found = self._check.run(context, history)
        except (OSError, ValueError, MegatrainError) as error:
            # a check that cannot be run does not show that the host is unfit
            _logger.exception("health check %s of host %s could not be run", self._check.names[0], context.host)
            self._found = [warning(name, f"could not be run: {error}") for name in self._check.names]
        finally:
            self._ended = time.monotonic()
