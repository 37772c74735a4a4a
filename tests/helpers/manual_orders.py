"""Stand-ins for an agent's interfaces: orders that a test sets, and a record of the agent's reports."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from megatrain.contracts.records.rounds import RoundDeadlines
from megatrain_launcher.interfaces import Assignment, WorkerEnd
from tests.helpers.waiting import wait_until


@dataclass
class ManualOrders:
    """Orders that a test sets."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    assignments: list[Assignment] = field(default_factory=list)
    halts: dict[int, str] = field(default_factory=dict)
    saving: set[int] = field(default_factory=set)
    deadlines: dict[int, RoundDeadlines] = field(default_factory=dict)
    is_over: bool = False

    def next_assignment(self, after: int) -> Assignment | None:
        with self.changed:
            while not self.is_over:
                for assignment in self.assignments:
                    if assignment.round.number > after:
                        return assignment
                self.changed.wait()
            return None

    def stop_reason(self, number: int) -> str:
        with self.changed:
            return self.halts.get(number, "the job is over" if self.is_over else "")

    def is_saving(self, number: int) -> bool:
        with self.changed:
            return number in self.saving

    def published_deadlines(self, number: int) -> RoundDeadlines:
        with self.changed:
            return self.deadlines.get(number, RoundDeadlines(number))

    def give(self, assignment: Assignment) -> None:
        with self.changed:
            self.assignments.append(assignment)
            self.changed.notify_all()

    def halt(self, number: int, *, is_saving: bool = False) -> None:
        with self.changed:
            self.halts[number] = "halted by the test"
            if is_saving:
                self.saving.add(number)

    def leave(self) -> None:
        with self.changed:
            self.is_over = True
            self.changed.notify_all()


@dataclass
class ReportRecorder:
    """Records the agent's reports, in order."""

    reports: list[tuple[str, Any]] = field(default_factory=list)

    def workers_started(self, assignment: Assignment, pids: dict[int, int]) -> None:
        self._record("started", pids)

    def worker_ended(self, assignment: Assignment, end: WorkerEnd) -> None:
        self._record("ended", end)

    def workers_stopping(self, assignment: Assignment) -> None:
        self._record("stopping", assignment.round.number)

    def workers_stopped(self, assignment: Assignment) -> None:
        self._record("stopped", assignment.round.number)

    def _record(self, kind: str, value: Any) -> None:
        self.reports.append((kind, value))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.reports]

    @property
    def ends(self) -> list[WorkerEnd]:
        return [value for kind, value in self.reports if kind == "ended"]

    @property
    def pids(self) -> list[int]:
        return [pid for kind, value in self.reports if kind == "started" for pid in value.values()]

    def wait_for(self, kind: str, count: int = 1) -> None:
        wait_until(lambda: self.kinds.count(kind) >= count, f"{count} x {kind} in {self.reports}")
