"""Handles the agent's events about workers: updates the host's state, and saves evidence while it exists."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from megatrain_launcher.executor.crash_evidence import CrashEvidence
from megatrain_launcher.executor.evidence import hang_evidence
from megatrain_launcher.executor.host_status_builder import HostStatusBuilder
from megatrain_launcher.executor.progress import RoundProgress, host_progress
from megatrain_launcher.interfaces import Assignment, WorkerEnd


class WorkerEvents:
    """Implements `interfaces.WorkerListener`. Runs in the agent's thread, so it never waits for a disk or for etcd."""

    def __init__(self, host: str, state: HostStatusBuilder, crash: CrashEvidence, session: Callable[[], str]) -> None:
        """`session` returns the current session of this host."""
        self._host, self._state, self._crash, self._session = host, state, crash, session
        self._pids: dict[int, int] = {}

    def workers_started(self, assignment: Assignment, pids: dict[int, int]) -> None:
        self._pids = {assignment.part.first_rank + local_rank: pid for local_rank, pid in pids.items()}
        self._state.workers_started(assignment, pids)

    def worker_ended(self, assignment: Assignment, end: WorkerEnd) -> None:
        self._state.worker_ended(assignment, end)

    def workers_stopping(self, assignment: Assignment) -> None:
        """Report that workers are being stopped, and read the ranks' positions while their processes still exist.

        The round is already broken, here or on another host, so earlier evidence takes precedence
        (`crash_evidence.counts`).
        """
        number = assignment.round.number
        self._state.workers_stopping(assignment)
        if not self._state.is_broken(number) or not self._pids:
            return
        with closing(RoundProgress(self._paths(assignment), self._pids, time.time())) as progress:
            progress.poll()
            found = hang_evidence(self._host, self._session(), number, progress.watches, time.time())
        self._crash.keep_positions(replace(found, is_after_halt=True))

    def workers_stopped(self, assignment: Assignment) -> None:
        is_broken = self._state.is_broken(assignment.round.number)
        if is_broken and self._pids:
            self._read_last_steps(assignment)
        self._state.workers_stopped(assignment)
        self._pids = {}
        if is_broken:
            self._crash.keep_boxes(assignment.round.number, self._paths(assignment))

    def _read_last_steps(self, assignment: Assignment) -> None:
        with closing(RoundProgress(self._paths(assignment), self._pids, time.time())) as progress:
            found = host_progress(progress.poll(), assignment.part.num_workers, progress.started_unix_s)
        self._state.set_last_steps(assignment.round.number, found)

    def _paths(self, assignment: Assignment) -> dict[int, Path]:
        return self._crash.box_paths.paths(assignment.round.number, assignment.part.ranks)
