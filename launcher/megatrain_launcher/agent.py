"""The agent of a host waits for a round that includes this host, runs the round's workers, and reports their exits.

The driver makes all decisions. When a round fails here or is halted, the agent stops its workers, reports that, and
waits for the next round.
Source: ADR 0019, 0071.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megatrain.contracts.exit_codes import GOOD_ENDS, ExitCode
from megatrain_launcher.interfaces import Assignment, Orders, WorkerEnd, WorkerListener
from megatrain_launcher.logs.worker_logs import WorkerLogs
from megatrain_launcher.standby.client import StandbyClient, StandbyError
from megatrain_launcher.standby.messages import WorkerStart
from megatrain_launcher.standby.server_keeper import WorkerExit
from megatrain_launcher.worker_environment import worker_environment

_logger = logging.getLogger(__name__)

MONITOR_INTERVAL_S: Final = 0.05
"""The longest time until a halt is noticed if `wake` is not called."""
CAUSE_TIMEOUT_S: Final = 0.5
"""If the first failure here is only a consequence of another worker's failure, wait this long for the cause to appear
on this host."""
_GRACE_SLACK_S: Final = 2.0
"""Added to the time for a save: a worker's own watchdog, which logs the reason, must end the worker first."""
_WARN_INTERVAL_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The workers of a job, and their program. `environment`: their variables, without the variables of a round."""

    job: str
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    directory: Path
    save_grace_s: float


@dataclass(slots=True)
class _RunningRound:
    """The round that has workers on this host."""

    assignment: Assignment
    pids: dict[int, int] = field(default_factory=dict)
    """By local rank."""
    exit_codes: dict[int, int] = field(default_factory=dict)
    """By local rank, for workers that exited by themselves."""
    first_failure_at: float | None = None
    has_cause: bool = False
    """Whether one of the failures here is a cause, not a consequence of another worker's failure."""
    asked_to_save_at: float | None = None

    def rank(self, local_rank: int) -> int:
        return self.assignment.part.first_rank + local_rank


class RoundAgent:
    """Runs one host's workers. `run` returns when no further round is assigned."""

    def __init__(
        self,
        settings: AgentSettings,
        orders: Orders,
        listener: WorkerListener,
        standby: StandbyClient,
        logs: WorkerLogs,
    ) -> None:
        self._settings = settings
        self._orders = orders
        self._listener = listener
        self._standby = standby
        self._logs = logs
        self._changed = threading.Event()
        standby.set_change_callback(self.wake)

    def wake(self) -> None:
        """Make the agent check at once whether the round must stop. May be called from any thread."""
        self._changed.set()

    def run(self) -> None:
        """Run each round that names this host, one after another, until the job is over or this host leaves it."""
        number = 0
        while (assignment := self._orders.next_assignment(number)) is not None:
            number = assignment.round.number
            running = _RunningRound(assignment)
            try:
                self._start_workers(running)
                self._watch(running)
            finally:
                self._stop_workers(running)

    # One round

    def _start_workers(self, running: _RunningRound) -> None:
        assignment, settings = running.assignment, self._settings
        while not self._standby.wait_ready(MONITOR_INTERVAL_S):
            if self._orders.stop_reason(assignment.round.number):
                return
        outputs = []
        try:
            for local_rank in range(assignment.part.num_workers):
                outputs.append(self._logs.open_rank(assignment.round.number, running.rank(local_rank)))
            pids = self._standby.start_workers(
                [
                    WorkerStart(
                        rank=running.rank(local_rank),
                        module=settings.module,
                        arguments=settings.arguments,
                        environment=worker_environment(settings.environment, settings.job, assignment, local_rank),
                        directory=str(settings.directory),
                    )
                    for local_rank in range(assignment.part.num_workers)
                ],
                outputs,
            )
        except (StandbyError, OSError) as error:
            self._report_failed_start(running, str(error))
            return
        finally:
            for output in outputs:
                os.close(output)
        running.pids = dict(enumerate(pids))
        self._listener.workers_started(assignment, dict(running.pids))

    def _watch(self, running: _RunningRound) -> None:
        """Report worker exits until the round's workers must be stopped."""
        while True:
            self._changed.wait(MONITOR_INTERVAL_S)
            self._changed.clear()
            self._report_ends(running)
            if self._is_over(running):
                return

    def _stop_workers(self, running: _RunningRound) -> None:
        """Let the listener save evidence of the round's processes, then kill those that still run."""
        self._listener.workers_stopping(running.assignment)
        self._standby.kill_all()
        while not self._standby.wait_gone(_WARN_INTERVAL_S):
            _logger.warning(
                "processes of round %d cannot be killed: they wait in the kernel for a disk or a device that does not "
                "answer",
                running.assignment.round.number,
            )
        # an exit here that was not seen yet may be the original cause, if its victims on other hosts were reported
        # first
        self._report_ends(running)
        self._logs.close_round()
        self._listener.workers_stopped(running.assignment)

    def _is_over(self, running: _RunningRound) -> bool:
        """Return whether the round has ended on this host: it failed, its workers are done, or it must be stopped."""
        now = time.monotonic()
        if running.first_failure_at is not None:
            is_time_up = now >= running.first_failure_at + CAUSE_TIMEOUT_S
            if running.has_cause or is_time_up or len(running.exit_codes) == len(running.pids):
                return True
        elif running.pids and len(running.exit_codes) == len(running.pids):
            return True
        number = running.assignment.round.number
        return bool(self._orders.stop_reason(number)) and not self._may_save(running, number, now)

    def _may_save(self, running: _RunningRound, number: int, now: float) -> bool:
        """Ask the workers once to save and stop; return whether they still have time for it."""
        if not running.pids or not self._orders.is_saving(number):
            return False
        if running.asked_to_save_at is None:
            running.asked_to_save_at = now
            self._standby.signal_workers(running.pids.values(), signal.SIGTERM)
        grace_s = max(self._settings.save_grace_s, self._orders.published_deadlines(number).stop_s)
        return now < running.asked_to_save_at + grace_s + _GRACE_SLACK_S

    def _report_ends(self, running: _RunningRound) -> None:
        local_ranks = {pid: local_rank for local_rank, pid in running.pids.items()}
        for found in self._standby.take_exits():
            if found.pid in local_ranks and not found.is_killed:
                self._report_end(running, local_ranks[found.pid], found)

    def _report_end(self, running: _RunningRound, local_rank: int, found: WorkerExit) -> None:
        rank = running.rank(local_rank)
        log_verdict = self._logs.log_verdict_at_end(rank)
        is_failure = found.exit_code not in GOOD_ENDS
        if not is_failure:
            log_verdict = None
        running.exit_codes[local_rank] = found.exit_code
        if is_failure:
            if running.first_failure_at is None:
                running.first_failure_at = time.monotonic()
            is_consequence = log_verdict.is_cascade if log_verdict is not None else found.exit_code >= 0
            running.has_cause = running.has_cause or not is_consequence
        line = found.note or ("" if log_verdict is None else log_verdict.line)
        end = WorkerEnd(local_rank, rank, found.pid, found.exit_code, found.at_unix_s, log_verdict, line)
        self._listener.worker_ended(running.assignment, end)

    def _report_failed_start(self, running: _RunningRound, reason: str) -> None:
        """Report that workers could not be started, as an exit of the first worker with pid 0."""
        _logger.error("round %d: %s", running.assignment.round.number, reason)
        running.first_failure_at, running.has_cause = time.monotonic(), True
        end = WorkerEnd(0, running.rank(0), 0, ExitCode.FAILURE, time.time(), None, reason)
        self._listener.worker_ended(running.assignment, end)
