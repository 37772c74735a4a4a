"""Builds the host's status from the reports of the agent and the round follower, and from the orders.

The agent's thread reports starts and exits of workers. The round follower's thread reports the contents of their black
boxes. `status` derives the HostStatus from these facts; the phase is never stored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from megatrain.contracts.exit_codes import GOOD_ENDS
from megatrain.contracts.records.host_records import HostPhase, HostStatus, Milestones, RankFailure, Stall
from megatrain_job.failures.culprit import first_of
from megatrain_job.failures.verdict import Verdict
from megatrain_launcher.executor.order_state import OrdersView
from megatrain_launcher.executor.progress import HostProgress
from megatrain_launcher.interfaces import Assignment, WorkerEnd

_MAX_FAILURES = 64
_MAX_LINE = 400
_PEER = "peer "


@dataclass(slots=True)
class _RoundState:
    """The state of the round of this host's current or latest workers."""

    assignment: Assignment
    pids: dict[int, int] = field(default_factory=dict)
    started_unix_s: float | None = None
    ends: dict[int, WorkerEnd] = field(default_factory=dict)
    """By local rank, for workers that exited by themselves."""
    progress: HostProgress | None = None
    stall: Stall | None = None
    is_stopping: bool = False
    is_stopped: bool = False
    fenced: str = ""
    alarm: str = ""
    """A line in a live rank's log that indicates a failure."""

    @property
    def number(self) -> int:
        return self.assignment.round.number

    @property
    def failed(self) -> list[WorkerEnd]:
        bad = (end for end in self.ends.values() if end.exit_code not in GOOD_ENDS)
        return sorted(bad, key=lambda end: end.at_unix_s)

    @property
    def is_done(self) -> bool:
        return len(self.ends) == self.assignment.part.num_workers and not self.failed

    def alive(self) -> list[int]:
        """Return the local ranks that have a process."""
        return [] if self.is_stopped else [rank for rank in self.pids if rank not in self.ends]


@dataclass(frozen=True, slots=True)
class Running:
    """The running workers, for the round follower."""

    assignment: Assignment
    pids: Mapping[int, int]
    started_unix_s: float


class HostStatusBuilder:
    """Collects reports, through `interfaces.WorkerListener` and setters, and builds the status. Thread-safe.

    `on_change` is called after each change that must be published at once.
    """

    def __init__(self, host: str, on_change: Callable[[], None] = lambda: None) -> None:
        self._host = host
        self._on_change = on_change
        self._lock = threading.Lock()
        self._round: _RoundState | None = None
        self._completed_command = 0

    def begin_session(self) -> None:
        """Drop the state of the earlier session's round, which has no workers left."""
        with self._lock:
            self._round = None
        self._on_change()

    def workers_started(self, assignment: Assignment, pids: Mapping[int, int]) -> None:
        with self._lock:
            self._round = _RoundState(assignment, dict(pids), time.time())
        self._on_change()

    def worker_ended(self, assignment: Assignment, end: WorkerEnd) -> None:
        """Record the exit of a worker. A later report of the same exit, with a log verdict, replaces the first."""
        with self._lock:
            self._at(assignment).ends[end.local_rank] = end
        self._on_change()

    def workers_stopping(self, assignment: Assignment) -> None:
        with self._lock:
            self._at(assignment).is_stopping = True
        self._on_change()

    def workers_stopped(self, assignment: Assignment) -> None:
        with self._lock:
            self._at(assignment).is_stopped = True
        self._on_change()

    def set_progress(self, number: int, progress: HostProgress) -> None:
        """Set the progress from a round's black boxes. It is published at once only if a milestone was reached."""
        with self._lock:
            if (known := self._of(number)) is None:
                return
            before = known.progress
            known.progress = progress = _with_steps(progress, before)
        if before is None or (before.milestones, before.has_stepped) != (progress.milestones, progress.has_stepped):
            self._on_change()

    def set_last_steps(self, number: int, progress: HostProgress) -> None:
        """Set the ranks' last steps, read after the last write to their black boxes.

        The previous reading may be a step old, and the limit on restarts without progress compares last steps.
        """
        with self._lock:
            if (known := self._of(number)) is None:
                return
            before = known.progress or HostProgress(Milestones(started_unix_s=known.started_unix_s))
            resumed = progress.resumed_step if before.resumed_step is None else before.resumed_step
            known.progress = replace(_with_steps(before, progress), resumed_step=resumed)

    def set_stall(self, number: int, stall: Stall | None) -> None:
        """Set the stall of a round, or None after its end."""
        with self._lock:
            if (known := self._of(number)) is not None:
                known.stall = stall
        self._on_change()

    def set_alarm(self, number: int, rank: int, verdict: Verdict) -> None:
        """Set the finding from the log of a rank that still runs."""
        with self._lock:
            if (known := self._of(number)) is not None:
                known.alarm = f"rank {rank}: {verdict.line}"[:_MAX_LINE]
        self._on_change()

    def set_fenced(self, number: int, reason: str) -> None:
        with self._lock:
            if (known := self._of(number)) is not None:
                known.fenced = reason
        self._on_change()

    def set_completed_command(self, number: int) -> None:
        with self._lock:
            if number == self._completed_command:
                return
            self._completed_command = number
        self._on_change()

    def running(self) -> Running | None:
        """Return the running workers; None if there are none, or if they are being stopped."""
        with self._lock:
            known = self._round
            if known is None or known.is_stopping or known.is_stopped or known.started_unix_s is None:
                return None
            return Running(known.assignment, dict(known.pids), known.started_unix_s)

    def failed_round(self) -> int:
        """Return the number of this host's newest round if a worker of it has failed, else 0."""
        with self._lock:
            known = self._round
            return known.number if known is not None and known.failed else 0

    def is_broken(self, number: int) -> bool:
        """Return whether a round did not end normally, so that its black boxes must be kept as evidence."""
        with self._lock:
            known = self._of(number)
            return known is not None and not known.is_done

    def status(self, session: str, orders: OrdersView, problem: str) -> HostStatus:
        """Return this host's current status. `orders` must have been read before the call."""
        with self._lock:
            known = self._round
            if known is None or (orders.taken_round > known.number):
                return self._idle_status(session, orders, problem)
            if known.is_stopped and orders.taken_round != known.number and orders.newest_halt > known.number:
                return self._idle_status(session, orders, problem)
            return self._round_status(known, session, orders, problem)

    def _idle_status(self, session: str, orders: OrdersView, problem: str) -> HostStatus:
        """Return the status without workers: before the first round, between rounds, or before workers start."""
        phase, number = HostPhase.PARKED, orders.newest_halt
        if orders.taken_round:
            phase, number = HostPhase.STARTING, orders.taken_round
        elif number and orders.named_in == number:
            phase = HostPhase.STOPPED
        return HostStatus(
            self._host, session, phase, round=number, completed_command=self._completed_command, problem=problem
        )

    def _round_status(self, known: _RoundState, session: str, orders: OrdersView, problem: str) -> HostStatus:
        progress = known.progress or HostProgress(Milestones(started_unix_s=known.started_unix_s))
        codes = [end.exit_code for end in known.ends.values()]
        return HostStatus(
            host=self._host,
            session=session,
            phase=_phase(known, progress, is_halted=orders.newest_halt >= known.number),
            round=known.number,
            alive_ranks=_bitmap(known.alive()),
            min_step=progress.min_step,
            max_step=progress.max_step,
            resumed_step=progress.resumed_step,
            last_step_unix_s=progress.last_step_unix_s,
            median_step_s=progress.median_step_s,
            interval_s=progress.interval_s,
            stop_s=progress.stop_s,
            save_interval_s=progress.save_interval_s,
            step_phase=progress.step_phase,
            exit_code=max(codes) if known.is_done else None,
            milestones=progress.milestones,
            failures=tuple(_failure(end) for end in known.failed[:_MAX_FAILURES]),
            stall=known.stall,
            completed_command=self._completed_command,
            lost_hosts=_lost_hosts(known),
            last_error=known.fenced or _last_error(known),
            problem=problem,
        )

    def _of(self, number: int) -> _RoundState | None:
        """Return the state of a round; None if it is not the round of this host's latest workers."""
        return self._round if self._round is not None and self._round.number == number else None

    def _at(self, assignment: Assignment) -> _RoundState:
        """Return the state of this round; create it if the round's workers were never started."""
        known = self._of(assignment.round.number)
        if known is None:
            known = self._round = _RoundState(assignment)
        return known


def _phase(known: _RoundState, progress: HostProgress, *, is_halted: bool) -> HostPhase:
    # workers that this host asked to save and stop have not finished their training
    is_done = known.is_done and not known.fenced
    if known.is_stopped and not is_done:
        return HostPhase.STOPPED if is_halted else HostPhase.FAILED
    if is_done:
        return HostPhase.DONE
    if known.failed:
        return HostPhase.FAILED
    if known.is_stopping:
        return HostPhase.STOPPING
    return HostPhase.RUNNING if progress.has_stepped else HostPhase.STARTING


def _with_steps(progress: HostProgress, other: HostProgress | None) -> HostProgress:
    """Return progress with the higher steps of two polls, because the steps of a round never decrease."""
    if other is None:
        return progress
    return replace(
        progress,
        min_step=_later(progress.min_step, other.min_step),
        max_step=_later(progress.max_step, other.max_step),
    )


def _later(one: int | None, other: int | None) -> int | None:
    return max((step for step in (one, other) if step is not None), default=None)


def _bitmap(local_ranks: list[int]) -> str:
    return f"{sum(1 << rank for rank in local_ranks):x}" if local_ranks else ""


def _failure(end: WorkerEnd) -> RankFailure:
    failure = RankFailure(end.rank, end.exit_code, end.at_unix_s, line=end.line[:_MAX_LINE])
    if (found := end.log_verdict) is None:
        return failure
    return replace(
        failure,
        label=found.label.value,
        action=found.action.value,
        is_cascade=found.is_cascade,
        culprit=found.culprit or "",
    )


def _lost_hosts(known: _RoundState) -> tuple[str, ...]:
    """Return the addresses of peers to which cascade victims lost the connection, according to the victims' logs."""
    culprits = [failure.culprit for failure in map(_failure, known.failed) if failure.is_cascade]
    return tuple(dict.fromkeys(text.removeprefix(_PEER) for text in culprits if text.startswith(_PEER)))


def _last_error(known: _RoundState) -> str:
    first = first_of([_failure(end) for end in known.failed])
    return known.alarm if first is None else first.line
