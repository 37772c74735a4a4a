"""Keeps <run>/diagnosis/state.json up to date: `write` replaces the file if the state has changed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from megatrain.contracts.records.diag_records import DaemonRecord
from megatrain_diagnostics.collector.counters import IngestCounters, IngestStatistics
from megatrain_diagnostics.metrics.job_metrics import AssessmentSource
from megatrain_diagnostics.metrics.training_metrics import refused_by_reason
from megatrain_diagnostics.store.daemon_state import (
    STATE_NAME,
    DaemonState,
    ranges_of,
    scores_text,
    storable,
    write_state,
)

_logger = logging.getLogger(__name__)
_WARNING_PAUSE_S = 60.0


class LiveAssessmentSource(AssessmentSource, Protocol):
    """The part of the controller that the state file uses."""

    @property
    def round(self) -> int: ...

    @property
    def step(self) -> int | None: ...


class StateWriter:
    """Writes the daemon's state when it changes. For one thread; disk errors are logged and otherwise ignored."""

    def __init__(
        self,
        directory: Path,
        job: str,
        record: DaemonRecord,
        judge: LiveAssessmentSource,
        statistics: IngestStatistics,
        problem: Callable[[], str],
    ) -> None:
        """`record`: the record of this daemon; `problem`: returns why nothing can be stored, "" when storing works."""
        self._directory, self._job, self._record = directory, job, record
        self._judge, self._statistics, self._problem = judge, statistics, problem
        self._written: DaemonState | None = None
        self._next_warning_s = float("-inf")

    def write(self, now_s: float) -> bool:
        """Write the daemon's state if it differs from the file; return whether it was written. Units: unix seconds."""
        state = self._state()
        if self._written is not None and state == self._written and (self._directory / STATE_NAME).exists():
            return False
        try:
            write_state(self._directory, replace(state, written_unix_s=now_s))
        except OSError as error:
            if time.monotonic() >= self._next_warning_s:
                self._next_warning_s = time.monotonic() + _WARNING_PAUSE_S
                _logger.warning("the state for the dashboard cannot be written: %s", error)
            return False
        self._written = state
        return True

    def _state(self) -> DaemonState:
        counters, judge = self._statistics.counters(), self._judge
        known = judge.assessment
        return DaemonState(
            job=self._job,
            session=self._record.session,
            written_unix_s=0.0,
            round=judge.round,
            step=judge.step,
            rank_scores=scores_text(known.scores),
            host_scores=known.host_scores,
            thresholds=known.thresholds,
            findings=storable(known.findings),
            first_step=known.first_step,
            last_step=known.last_step,
            num_steps=known.num_steps,
            is_enough=known.is_enough,
            silent=ranges_of(judge.silent_ranks()),
            without_peers=ranges_of(known.ranks_without_peers),
            refused_rows=_refused(counters),
            dropped_rows=sum(counters.dropped_rows.values()),
            connected_hosts=counters.connected,
            problem=self._problem(),
        )


def _refused(counters: IngestCounters) -> dict[str, int]:
    found = refused_by_reason(counters.refused_rows)
    for reason, count in refused_by_reason(counters.refused_batches).items():
        found[reason] = found.get(reason, 0) + count
    return found
