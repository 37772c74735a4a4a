"""What the parts of an executor ask of one another, so that each is built and tested with a stand-in of the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megatrain.contracts.rounds import Round, RoundDeadlines, RoundHost
from megatrain.failures.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Assignment:
    """This host's part in a round."""

    round: Round
    part: RoundHost


class Orders(Protocol):
    """What the agent follows. Methods may be called from any thread."""

    def next_assignment(self, after: int) -> Assignment | None:
        """Wait for a round with a number above `after` that names this host; None: leave, the job is over."""

    def must_stop(self, number: int) -> str:
        """Return why the workers of a round must be stopped now; empty while they may run."""

    def is_saving(self, number: int) -> bool:
        """Say whether workers of that round shall be asked to save and stop, rather than be killed."""

    def told_deadlines(self, number: int) -> RoundDeadlines:
        """Return the published time from step to step and time of a stop of that round."""


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """How a worker ended. `exit_code` is negative for a signal; `verdict` is None where its log says nothing."""

    local_rank: int
    rank: int
    pid: int
    exit_code: int
    at_unix_s: float
    verdict: Verdict | None
    line: str = ""
    """The line of its log that decided."""


class WorkerListener(Protocol):
    """Callbacks for the ends of workers. The agent's thread calls them; none may block for long."""

    def workers_started(self, assignment: Assignment, pids: dict[int, int]) -> None:
        """The workers of a round were forked; `pids` by local rank."""

    def worker_ended(self, assignment: Assignment, end: WorkerEnd) -> None:
        """A worker ended without being killed by us; called as soon as it is known and before the others are
        stopped."""

    def workers_stopping(self, assignment: Assignment) -> None:
        """Keep what the processes leave behind only while they live; then they are killed."""

    def workers_stopped(self, assignment: Assignment) -> None:
        """No process of the round is left on this host."""
