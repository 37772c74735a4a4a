"""The processes of a case of the overlap benchmark, one for each rank, and the orders that they execute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.overlap_trace import OverlapTrace
from tests.helpers.namespaces import HostNetwork
from tests.helpers.waiting import wait_until


@dataclass(frozen=True, slots=True)
class MeasuredBlock:
    """Consecutive steps: the seconds of one, the numbers (of the uncounted first step too), and the ranks' calls."""

    seconds: float
    steps: Sequence[int]
    traces: Sequence[OverlapTrace]


class RankProcesses:
    """The processes of a case, which execute one order after another."""

    def __init__(self, directory: Path, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._directory = directory
        self._processes = processes
        self._number = 0

    def order(self, **what: Any) -> list[dict[str, Any]]:
        """Send an order to all ranks; return their answers by rank."""
        number = self._write_order(what)
        wanted = [self._directory / f"answer-{number}-{rank}.json" for rank in range(len(self._processes))]

        def are_there() -> bool:
            dead = [rank for rank, process in enumerate(self._processes) if process.poll() is not None]
            assert not dead, f"rank {dead[0]} of the benchmark has died"
            return all(path.exists() for path in wanted)

        wait_until(are_there, f"order {number}, {what}", 600.0)
        return [json.loads(path.read_text()) for path in wanted]

    def end(self) -> None:
        """Make the processes end normally, so that their records are complete."""
        self._write_order({"what": "end"})
        for process in self._processes:
            assert process.wait(timeout=60.0) == 0

    def block(self, side: str, num_steps: int, is_traced: bool = False) -> MeasuredBlock:
        """Let all ranks train `num_steps` steps, after one that is not counted."""
        answers = self.order(what="block", side=side, num_steps=num_steps + 1, is_traced=is_traced)
        traces = [OverlapTrace.from_dict(answer["trace"]) for answer in answers if answer["trace"]]
        return MeasuredBlock(max(answer["seconds"] for answer in answers), answers[0]["steps"], traces)

    def _write_order(self, what: Mapping[str, Any]) -> int:
        number, self._number = self._number, self._number + 1
        unfinished = self._directory / f".order-{number}"
        unfinished.write_text(json.dumps(what))
        unfinished.rename(self._directory / f"order-{number}.json")
        return number


def start_rank(
    network: HostNetwork, interface: str, directory: Path, rank: int, shared: Mapping[str, Any]
) -> subprocess.Popen[bytes]:
    """Start the process of a rank on its host of `network`; as a context manager, it is killed at the end.

    interface: the network interface that gloo uses. shared: the settings of all ranks (overlap_rank.OverlapJob).
    """
    path = directory / f"job-{rank}.json"
    path.write_text(json.dumps({**shared, "rank": rank}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
    command = [*network.enter(rank), sys.executable, "-m", "benchmarks.overlap_rank", str(path)]
    return _Killed(command, env=environment)


class _Killed(subprocess.Popen[bytes]):
    """A process that is killed at the end of its block."""

    def __exit__(self, *error: Any) -> None:
        self.kill()
        super().__exit__(*error)
