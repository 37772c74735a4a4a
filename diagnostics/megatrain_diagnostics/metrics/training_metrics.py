"""The metrics of training: step, loss, tokens, step times. Committed rows update them; each scrape reads them.

Rows of earlier rounds are ignored. A step that is repeated after a restart counts again in the histogram of step times
and in the tokens, because it was computed again.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.black_box.operations import Operation, StepValue
from megatrain_diagnostics.analysis.confirmed_steps import ConfirmedSteps
from megatrain_diagnostics.collector.counters import RejectionReason
from megatrain_diagnostics.events.roster import world_sizes
from megatrain_diagnostics.events.tables import Ranks, StepTotals, Table, Values
from megatrain_diagnostics.metrics.readings import STEP_BUCKETS_S, JobReading

_NS = 1_000_000_000


class TrainingMetrics:
    """A consumer of committed rows. `consume` is called from one thread, the rest from any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._round = -1
        self._confirmed = ConfirmedSteps(1)
        self._values_step = -1
        """The newest step with a loss."""
        self._timed_step = -1
        self._newest: dict[int, float] = {}
        """StepValue -> value, of the newest step."""
        self._last_step_ns: int | None = None
        self._tokens = 0
        self._buckets = [0] * (len(STEP_BUCKETS_S) + 1)
        self._sum_s = 0.0
        self._last_step_s: float | None = None

    def consume(self, table: Table) -> None:
        """Receive rows that are on disk."""
        with self._lock:
            if isinstance(table, Ranks):
                self._take_ranks(table)
            elif isinstance(table, Values):
                self._take_values(table)
            elif isinstance(table, StepTotals):
                self._take_totals(table)

    def tick(self, now_s: float) -> None:
        """Do nothing: only rows change the numbers."""

    def reading(self, job: str, version: str) -> JobReading:
        """Return a reading with the numbers that come from rows; other fields have their default values."""
        with self._lock:
            newest, step_s = self._newest, self._last_step_s
            flops, peak = (_finite(newest.get(kind, 0.0)) for kind in (StepValue.MODEL_FLOPS, StepValue.PEAK_FLOPS))
            return JobReading(
                job=job,
                version=version,
                step=self._values_step if self._values_step >= 0 else None,
                loss=newest.get(StepValue.LOSS),
                grad_norm=newest.get(StepValue.GRAD_NORM),
                tokens=self._tokens,
                last_step_unix_s=None if self._last_step_ns is None else self._last_step_ns / _NS,
                mfu=flops / step_s / peak if flops and step_s and peak else None,
                step_buckets=tuple(self._buckets),
                step_sum_s=self._sum_s,
            )

    def _take_ranks(self, table: Ranks) -> None:
        self._begin(int(table.round.max(initial=-1)))
        now = table.round == self._round
        sizes = world_sizes(table)[now]
        self._confirmed.num_needed = max(self._confirmed.num_needed, min(2, int(sizes.max(initial=1))))

    def _take_values(self, table: Values) -> None:
        self._begin(int(table.round.max(initial=-1)))
        fresh = (table.round == self._round) & (table.step > self._values_step)
        fresh &= self._is_confirmed(table, fresh)
        for step in np.unique(table.step[fresh]).tolist():
            rows = np.flatnonzero(fresh & (table.step == step))
            of_step = {int(table.kind[row]): float(table.value[row]) for row in rows}
            if StepValue.LOSS not in of_step:
                continue  # the loss of this step is in a later batch
            self._values_step, self._newest = step, of_step
            self._last_step_ns = int(table.at_ns[rows].max())
            self._tokens += int(_finite(of_step.get(StepValue.TOKENS, 0.0)))

    def _take_totals(self, table: StepTotals) -> None:
        self._begin(int(table.round.max(initial=-1)))
        is_step = table.operation == Operation.STEP.number
        fresh = is_step & (table.round == self._round) & (table.step > self._timed_step)
        fresh &= self._is_confirmed(table, fresh)
        # all ranks end a step at the same time, so the first rank's report has its duration
        steps, rows = np.unique(table.step[fresh], return_index=True)
        for step, row in zip(steps.tolist(), np.flatnonzero(fresh)[rows].tolist(), strict=True):
            seconds = int(table.sum_ns[row]) / _NS
            self._timed_step, self._last_step_s = step, seconds
            self._buckets[bisect_left(STEP_BUCKETS_S, seconds)] += 1
            self._sum_s += seconds

    def _is_confirmed(self, table: Values | StepTotals, rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
        self._confirmed.add(table.rank[rows], table.step[rows])
        return np.asarray(table.step <= self._confirmed.newest)

    def _begin(self, round_number: int) -> None:
        if round_number > self._round:
            self._round, self._values_step, self._timed_step = round_number, -1, -1
            self._confirmed = ConfirmedSteps(1)


def _finite(value: float) -> float:
    """Return a finite count; 0 for any other value."""
    return value if math.isfinite(value) and value > 0.0 else 0.0


def refused_by_reason(refused: Mapping[tuple[RejectionReason, str], int]) -> dict[str, int]:
    """Return counts by reason, summed over hosts, so that the number of label values is bounded."""
    found: dict[str, int] = {}
    for (reason, _), count in refused.items():
        found[str(reason)] = found.get(str(reason), 0) + count
    return found
