"""The two interfaces of the agent: it reads its orders from `Orders` and reports its workers to `WorkerListener`.

The executor implements both (`OrderState`, `WorkerEvents`). The agent uses only the interfaces and the records in their
signatures, so tests can run it without etcd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megatrain.contracts.records.rounds import Round, RoundDeadlines, RoundHost
from megatrain_job.failures.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Assignment:
    """This host's part in a round."""

    round: Round
    part: RoundHost


class Orders(Protocol):
    """The orders that the agent follows. Methods may be called from any thread."""

    def next_assignment(self, after: int) -> Assignment | None:
        """Wait for a round with a number above `after` that includes this host; None: the agent must return."""

    def stop_reason(self, number: int) -> str:
        """Return why the workers of a round must be stopped now; empty while they may run."""

    def is_saving(self, number: int) -> bool:
        """Return whether the workers of a round must be asked to save and stop, instead of being killed."""

    def published_deadlines(self, number: int) -> RoundDeadlines:
        """Return the published interval and stop time of a round; zeros if none are published."""


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """The exit of a worker. `exit_code` is negative for a signal; `log_verdict` is None if its log names no failure."""

    local_rank: int
    rank: int
    pid: int
    exit_code: int
    at_unix_s: float
    log_verdict: Verdict | None
    line: str = ""
    """The standby server's note on the exit, or else the log line on which the verdict is based."""


class WorkerListener(Protocol):
    """Callbacks for the starts and exits of workers. The agent's thread calls them; none may block for long."""

    def workers_started(self, assignment: Assignment, pids: dict[int, int]) -> None:
        """The workers of a round were forked; `pids` by local rank."""

    def worker_ended(self, assignment: Assignment, end: WorkerEnd) -> None:
        """A worker exited by itself. Called at once, before the other workers are stopped."""

    def workers_stopping(self, assignment: Assignment) -> None:
        """The round's processes are about to be killed: save the evidence that exists only while they live."""

    def workers_stopped(self, assignment: Assignment) -> None:
        """No process of the round is left on this host."""
