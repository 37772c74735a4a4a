"""A torch LocalElasticAgent that follows rounds: it waits for a round, runs its workers, and reports their ends.

The one idea: the agent decides nothing. Rendezvous is the wait for a round that names this host, restarts have no
limit, and a round that broke here or was halted is ended and reported. Source: ADR 0019.
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
from typing import Any, Final

from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from megatrain.contracts.exit_codes import ExitCode
from megatrain_launcher.interfaces import Assignment, Orders, WorkerEnd, WorkerListener
from megatrain_launcher.logs.worker_logs import WorkerLogs
from megatrain_launcher.standby.client import StandbyClient, StandbyError, WorkerExit
from megatrain_launcher.standby.messages import WorkerStart
from megatrain_launcher.worker_environment import MAX_RESTARTS, ROLE, worker_environment

_logger = logging.getLogger(__name__)

GOOD_ENDS: Final = frozenset({ExitCode.OK, ExitCode.SAVED_AND_STOPPED})
MONITOR_INTERVAL_S: Final = 0.05
"""How long a halt can go unseen if `wake` is not called."""
CAUSE_TIMEOUT_S: Final = 0.5
"""After a worker ended because of another one, the host's other workers get this long to show the cause."""
_GRACE_SLACK_S: Final = 2.0
"""Added to the grace: a worker's own watchdog, which logs the reason, must end the worker first."""
_WARN_INTERVAL_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What the workers of a job run. `environment` is theirs, except for the round's variables."""

    job: str
    num_workers: int
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    directory: Path
    save_grace_s: float


@dataclass(slots=True)
class _RunningRound:
    """The round that has workers here."""

    assignment: Assignment
    pids: dict[int, int] = field(default_factory=dict)
    """By local rank."""
    exit_codes: dict[int, int] = field(default_factory=dict)
    """Of the workers that ended by themselves, by local rank."""
    first_failure_at: float | None = None
    has_cause: bool = False
    """A known failure is not explained by another worker's failure."""
    asked_to_save_at: float | None = None

    def rank(self, local_rank: int) -> int:
        return self.assignment.part.first_rank + local_rank


class RoundRendezvous(RendezvousHandler):  # type: ignore[misc]
    """Waits until a round names this host."""

    def __init__(self, job: str, orders: Orders, store: Store) -> None:
        self._job = job
        self._orders = orders
        self._store = store
        self.assignment: Assignment | None = None
        """The newest round that was returned."""

    def get_backend(self) -> str:
        return "megatrain"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round. Raises: RendezvousGracefulExitError when the job is over."""
        after = 0 if self.assignment is None else self.assignment.round.number
        assignment = self._orders.next_assignment(after)
        if assignment is None:
            raise RendezvousGracefulExitError("the job is over, or this host leaves it")
        self.assignment = assignment
        a_round = assignment.round
        meeting_place = RendezvousStoreInfo(a_round.store_address, a_round.store_port)
        return RendezvousInfo(self._store, a_round.hosts.index(assignment.part), len(a_round.hosts), meeting_place)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: rounds end, but a job's name stays valid."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._job

    def shutdown(self) -> bool:
        return True


class RoundAgent(LocalElasticAgent):  # type: ignore[misc]
    """Runs one host's workers. `run` returns when the orders say that the job is over."""

    def __init__(
        self,
        settings: AgentSettings,
        orders: Orders,
        listener: WorkerListener,
        standby: StandbyClient,
        logs: WorkerLogs,
        store: Store,
    ) -> None:
        self._rendezvous_handler = RoundRendezvous(settings.job, orders, store)
        spec = WorkerSpec(
            role=ROLE,
            local_world_size=settings.num_workers,
            rdzv_handler=self._rendezvous_handler,
            entrypoint=settings.module,
            args=settings.arguments,
            max_restarts=MAX_RESTARTS,
            monitor_interval=MONITOR_INTERVAL_S,
        )
        super().__init__(spec, DefaultLogsSpecs(os.devnull))  # else torch makes a directory for logs
        self._settings = settings
        self._orders = orders
        self._listener = listener
        self._standby = standby
        self._logs = logs
        self._running: _RunningRound | None = None
        self._changed = threading.Event()
        standby.notify(self.wake)

    def wake(self) -> None:
        """Check at once whether the round must stop. From any thread."""
        self._changed.set()

    # Methods that torch's agent calls

    def _invoke_run(self, role: str = ROLE) -> RunResult:
        while True:
            self._initialize_workers(self._worker_group)
            self._worker_group.state = self._watch()
            self._stop_workers(self._worker_group)

    def _assign_worker_ranks(
        self, _store: Store, _group_rank: int, _group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Take the ranks that the round names: no rendezvous is needed."""
        assignment = self._rendezvous_handler.assignment
        assert assignment is not None
        workers = []
        for local_rank in range(spec.local_world_size):
            rank, world_size = assignment.part.first_rank + local_rank, assignment.round.world_size
            workers.append(Worker(local_rank, rank, rank, world_size, world_size))
        return workers

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        assignment = self._rendezvous_handler.assignment
        assert assignment is not None
        running = self._running = _RunningRound(assignment)
        while not self._standby.wait_ready(MONITOR_INTERVAL_S):
            if self._orders.stop_reason(assignment.round.number):
                return {}
        settings = self._settings
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
            return {}
        finally:
            for output in outputs:
                os.close(output)
        running.pids = dict(enumerate(pids))
        self._listener.workers_started(assignment, dict(running.pids))
        return dict(running.pids)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Report the ends of workers; return the state of the round on this host."""
        running = self._running
        assert running is not None
        self._report_ends(running)
        return RunResult(state=self._state_of(running))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Keep the evidence of the round's processes, and kill those that are left."""
        running, self._running = self._running, None
        if running is None:
            return
        self._listener.workers_stopping(running.assignment)
        self._standby.kill_all()
        while not self._standby.wait_gone(_WARN_INTERVAL_S):
            _logger.warning(
                "processes of round %d cannot be killed: they wait in the kernel for a disk or a device that does not "
                "answer",
                running.assignment.round.number,
            )
        # the original cause may be an unseen end here, while victims on other hosts had the round halted first
        self._report_ends(running)
        self._logs.close_round()
        self._listener.workers_stopped(running.assignment)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._stop_workers(self._worker_group)

    # One round

    def _watch(self) -> WorkerState:
        """Wait until the round's workers must be stopped, and return their state."""
        while True:
            self._changed.wait(MONITOR_INTERVAL_S)
            self._changed.clear()
            state = self._monitor_workers(self._worker_group).state
            if state != WorkerState.HEALTHY:
                return state

    def _state_of(self, running: _RunningRound) -> WorkerState:
        now = time.monotonic()
        if running.first_failure_at is not None:
            is_time_up = now >= running.first_failure_at + CAUSE_TIMEOUT_S
            if running.has_cause or is_time_up or len(running.exit_codes) == len(running.pids):
                return WorkerState.FAILED
        elif running.pids and len(running.exit_codes) == len(running.pids):
            return WorkerState.SUCCEEDED
        number = running.assignment.round.number
        if self._orders.stop_reason(number) and not self._may_save(running, number, now):
            return WorkerState.UNHEALTHY
        return WorkerState.HEALTHY

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
        """Report that workers could not be started, as the end of the first one: pid 0, nothing more is known."""
        _logger.error("round %d: %s", running.assignment.round.number, reason)
        running.first_failure_at, running.has_cause = time.monotonic(), True
        end = WorkerEnd(0, running.rank(0), 0, ExitCode.FAILURE, time.time(), None, reason)
        self._listener.worker_ended(running.assignment, end)
