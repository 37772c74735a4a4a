"""One shared pool of rank processes for all tests that need several ranks.

Ranks are forks of the session's fork server, which has imported torch and the trainer: 8 of them start at once instead
of within 10 s. A rank waits for a function, runs it with a separate rendezvous, and waits for the next one; every run
starts from the same state (seed, default dtype, environment, no process group).

Failures are reported by rank: a raised error with its traceback, a dead process with its exit code, a stuck rank with
its stack. After anything except plain errors the processes are killed and replaced. A rank also ends by itself at the
deadline of its run and when the test session ends, so no process survives the tests.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatrain.contracts.closable import Closable
from tests.helpers.fork_server import fork_context
from tests.helpers.rank_protocol import FailedRank, RankContext, RankJob
from tests.helpers.waiting import DEADLINE_S, PATIENCE, DeadlineError

# After a first error the other ranks detect their peer's closed connections and fail too; a rank that does not is
# stuck.
AFTER_ERROR_S = 15.0 * PATIENCE
# A stuck rank writes its stack and ends itself at the deadline; the pool waits this much longer for that.
LAST_WORDS_S = 10.0 * PATIENCE


class RankError(Exception):
    """At least one rank failed. `failures` are ordered by time: the first is most likely the cause."""

    def __init__(self, function_name: str, world_size: int, failures: Sequence[FailedRank]) -> None:
        self.failures = tuple(sorted(failures, key=lambda failure: failure.time_ns))
        first = self.failures[0]
        parts = [f"{function_name} on {world_size} ranks: rank {first.rank} failed first: {first.description}"]
        for failure in self.failures[1:]:
            later_ms = (failure.time_ns - first.time_ns) / 1e6
            parts.append(f"rank {failure.rank} failed {later_ms:.1f} ms later: {failure.description}")
        super().__init__("\n".join(parts))


class RankDeadlineError(RankError, DeadlineError):
    """The first failure is that of a rank that did not return in time."""


@dataclass(frozen=True, slots=True)
class _Rank:
    process: BaseProcess
    link: Connection


class RankPool(Closable):
    """Up to `size` processes that run functions as ranks 0, 1, ... of a world. Use it as a context manager."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._directory = tempfile.TemporaryDirectory(prefix="megatrain-ranks-")
        self._ranks: list[_Rank] = []
        self._num_runs = 0

    @property
    def process_ids(self) -> list[int | None]:
        return [rank.process.pid for rank in self._ranks]

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = DEADLINE_S
    ) -> list[Any]:
        """Call `function(context, *args)` on `world_size` ranks and return their results in rank order.

        `function` is module-level, `args` and results can be pickled. Tests join the peers with `context.init_method`;
        process groups that the function leaves behind are destroyed.

        Raises: RankError when a rank raises or dies; RankDeadlineError if a rank has not returned after `timeout_s`.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size={world_size} must be between 1 and the pool's {self.size}")
        if "<" in function.__qualname__:
            raise TypeError(f"{function.__qualname__} must be a module-level function: ranks import it by name")
        self._start(world_size)
        self._num_runs += 1
        try:
            self._send(function, world_size, args, timeout_s)
            results, failures, is_clean = self._collect(world_size, timeout_s)
        except BaseException:  # also for a test's own timeout or Ctrl-C: the ranks are in the middle of an operation
            self._kill(world_size)
            raise
        if not is_clean:
            self._kill(world_size)
        if failures:
            first = min(failures, key=lambda failure: failure.time_ns)
            kind = RankDeadlineError if first.is_deadline else RankError
            raise kind(function.__qualname__, world_size, failures)
        return results

    def close(self) -> None:
        """End every process."""
        self._kill(self.size)
        self._directory.cleanup()

    def _start(self, world_size: int) -> None:
        """Start the missing ranks."""
        new_ranks = []
        context = fork_context()
        for rank in range(len(self._ranks), world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), name=f"rank-{rank}", daemon=True)
            process.start()
            theirs.close()
            new_ranks.append(_Rank(process, ours))
        self._ranks += new_ranks
        deadline_s = time.monotonic() + DEADLINE_S
        for new_rank in new_ranks:
            if not new_rank.link.poll(max(0.0, deadline_s - time.monotonic())):
                self._kill(world_size)
                raise DeadlineError(f"{new_rank.process.name} did not start within {DEADLINE_S} s")
            new_rank.link.recv_bytes()

    def _send(self, function: Callable[..., Any], world_size: int, args: Sequence[Any], timeout_s: float) -> None:
        rendezvous = Path(self._directory.name, f"rendezvous-{self._num_runs}")
        pickled_args = pickle.dumps(args)
        for rank, member in enumerate(self._ranks[:world_size]):
            job = RankJob(
                module_name=function.__module__,
                qualified_name=function.__qualname__,
                import_path=tuple(sys.path),
                context=RankContext(rank, world_size, f"file://{rendezvous}"),
                args=pickled_args,
                timeout_s=timeout_s,
                stack_file=str(self._stack_file(rank)),
            )
            member.link.send_bytes(pickle.dumps(job))

    def _collect(self, world_size: int, timeout_s: float) -> tuple[list[Any], list[FailedRank], bool]:
        """Wait for the ranks. Return results by rank, failures, and whether all processes can be used for another
        run."""
        results: list[Any] = [None] * world_size
        failures: list[FailedRank] = []
        waiting = {self._ranks[rank].link: rank for rank in range(world_size)}
        is_clean = True
        deadline_s = time.monotonic() + timeout_s + LAST_WORDS_S
        while waiting and (left_s := deadline_s - time.monotonic()) > 0:
            for link in connection.wait(list(waiting), timeout=left_s):
                assert isinstance(link, Connection)
                rank = waiting.pop(link)
                try:
                    outcome = pickle.loads(link.recv_bytes())
                except EOFError:
                    outcome = self._death(rank, timeout_s)
                    is_clean = False
                if isinstance(outcome, FailedRank):
                    failures.append(outcome)
                    deadline_s = min(deadline_s, time.monotonic() + AFTER_ERROR_S)
                else:
                    results[rank] = outcome
            if not is_clean:
                # A failing worker ends with its connections, so peers that wait for it detect it.
                for failure in failures:
                    self._ranks[failure.rank].process.kill()
        limit = f"{AFTER_ERROR_S} s after that" if failures else f"{timeout_s} s"
        for rank in waiting.values():
            failures.append(FailedRank(rank, time.monotonic_ns(), f"did not answer within {limit}", is_deadline=True))
        return results, failures, is_clean and not waiting

    def _death(self, rank: int, timeout_s: float) -> FailedRank:
        process = self._ranks[rank].process
        process.join(LAST_WORDS_S)
        stack_file = self._stack_file(rank)
        stack = stack_file.read_text() if stack_file.exists() else ""
        description = f"its process ended with exit code {process.exitcode}"
        if stack:
            description = f"did not return within {timeout_s} s. It was at:\n{stack}"
        return FailedRank(rank, time.monotonic_ns(), description, is_deadline=bool(stack))

    def _stack_file(self, rank: int) -> Path:
        return Path(self._directory.name, f"stack-{self._num_runs}-{rank}")

    def _kill(self, world_size: int) -> None:
        """Kill the ranks of a run. Other ranks did not take part, and keep what they have loaded."""
        killed, self._ranks = self._ranks[:world_size], self._ranks[world_size:]
        for rank in killed:
            rank.process.kill()
        for rank in killed:
            rank.process.join()
            rank.link.close()


def _serve(link: Connection) -> None:
    """Run as a rank. The import is here because it loads torch, which the test session itself may not need."""
    from tests.helpers.rank_worker import serve

    serve(link)
