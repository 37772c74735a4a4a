"""Live detection of stragglers at the size of MegaScale's largest job: the cost of a step for the daemon.

Steps of 12,288 ranks (8 operations each) are made outside the measured time, with noise and, from step 40 on, one slow
host. Each is entered and judged before the next, as in the daemon. The other side computes the same comparison again
from all kept steps each time, as an occasional report does (numpy, the newest 100 steps).

Run alone on the machine: python -m benchmarks live_detection [--write]
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.bars import at_most
from benchmarks.result import Result
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout
from megatrain.contracts.records.host_verdict import VerdictConfidence
from megatrain_diagnostics.analysis.findings import Thresholds
from megatrain_diagnostics.analysis.live import LiveDetection
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.tables import StepTotals, from_columns

LAYOUT = Layout(tp_size=8, pp_size=8, dp_size=192)
RANKS_PER_HOST = 8
STEPS = 100
BAR_MS = 100.0
"""A step of this number of ranks takes seconds, so below the bar detection keeps up with several jobs."""
SLOW_FROM = 40
SLOW_RANKS = range(808, 816)
SLOW_FACTOR = 1.15
ROW_ORDER_SEED = 7
TIMES_S = {
    Operation.STEP: 6.0,
    Operation.FORWARD_COMPUTE: 1.6,
    Operation.BACKWARD_COMPUTE: 3.2,
    Operation.FORWARD_RECV: 0.3,
    Operation.BACKWARD_RECV: 0.3,
    Operation.GRADS_REDUCE_SCATTER: 0.4,
    Operation.PARAMS_ALL_GATHER: 0.2,
    Operation.DATA_WAIT: 0.02,
}
_RECOMPUTED = 5
"""Steps for which the peer is measured; few, because it is slow."""


def run() -> Result:
    roster = Roster(
        round=1,
        layout=LAYOUT,
        hosts={rank: f"host-{rank // RANKS_PER_HOST:04d}" for rank in range(LAYOUT.world_size)},
        groups={},
    )
    live = LiveDetection(roster, Thresholds())
    spent_ms: list[float] = []
    named_at = None
    for step, totals in enumerate(_steps()):
        began = time.perf_counter()
        live.add_totals(totals, float(step))
        live.advance(float(step))
        spent_ms.append(1e3 * (time.perf_counter() - began))
        sure = [finding for finding in live.assessment.findings if finding.confidence is VerdictConfidence.HIGH]
        if sure and named_at is None:
            assert set(sure[0].hosts) == {f"host-{SLOW_RANKS[0] // RANKS_PER_HOST:04d}"}, sure[0].hosts
            named_at = step
    assert np.isfinite(live.assessment.scores).all()
    healthy, slow = spent_ms[5:SLOW_FROM], spent_ms[SLOW_FROM + 1 :]
    rows = [
        _row("incremental, no slow host", healthy),
        _row("incremental, one slow host", slow),
        _row(f"recomputed from {STEPS} steps", _recomputed(_RECOMPUTED)),
    ]
    return Result(
        name="live-detection",
        title=f"Live detection, {LAYOUT.world_size:,} ranks x {STEPS} steps x {len(TIMES_S)} operations",
        command="python -m benchmarks live_detection --write",
        rows=rows,
        notes=[
            "a step: enter its rows (in random order), score every rank and operation against its peers, judge",
            "recomputed: medians and spreads over all kept steps each time, no judging; the first two rows avoid this",
            _named_text(named_at),
            f"peak memory of the process, the generator included: {_peak_gib():.2f} GiB",
        ],
        settings={"layout": str(LAYOUT), "rows a step": LAYOUT.world_size * len(TIMES_S)},
        bars=[at_most(f"{row['side']}, p99 ms", row["p99 ms"], BAR_MS) for row in rows[:2]],
    )


def _named_text(named_at: int | None) -> str:
    slower = f"one host was made {100 * (SLOW_FACTOR - 1):.0f} % slower at step {SLOW_FROM}"
    return f"{slower}; it alone was named with high confidence, at step {named_at}"


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _row(side: str, spent_ms: list[float]) -> dict[str, Any]:
    return {
        "side": side,
        "steps": len(spent_ms),
        "median ms a step": statistics.median(spent_ms),
        "p99 ms": float(np.quantile(spent_ms, 0.99)),
        "worst ms": max(spent_ms),
    }


def _steps() -> Iterator[StepTotals]:
    random = np.random.default_rng(ROW_ORDER_SEED)
    for step in range(STEPS):
        yield _totals(step, random)


def _totals(step: int, random: np.random.Generator) -> StepTotals:
    """Return one step's rows in random order. The other ranks wait while a slow rank computes longer."""
    num, count = LAYOUT.world_size, len(TIMES_S)
    factor = 1.0 + 0.02 * random.normal(size=num)
    if step >= SLOW_FROM:
        factor[list(SLOW_RANKS)] *= SLOW_FACTOR
    seconds = {operation: np.full(num, usual_s) for operation, usual_s in TIMES_S.items()}
    late = (TIMES_S[Operation.FORWARD_COMPUTE] + TIMES_S[Operation.BACKWARD_COMPUTE]) * factor
    seconds[Operation.FORWARD_COMPUTE] = TIMES_S[Operation.FORWARD_COMPUTE] * factor
    seconds[Operation.BACKWARD_COMPUTE] = TIMES_S[Operation.BACKWARD_COMPUTE] * factor
    seconds[Operation.GRADS_REDUCE_SCATTER] += late.max() - late
    seconds[Operation.STEP] += late.max() - late.min()
    order = random.permutation(num * count)
    sums = (np.concatenate(list(seconds.values())) * 1e9).astype(np.int64)[order]
    return from_columns(
        StepTotals,
        {
            "round": np.ones(num * count, dtype=np.int32),
            "rank": np.tile(np.arange(num), count)[order],
            "sequence": order + step * num * count,
            "step": np.full(num * count, step),
            "operation": np.repeat([operation.number for operation in seconds], num)[order],
            "start_ns": np.full(num * count, 10**18 + step * 6 * 10**9),
            "sum_ns": sums,
            "max_ns": sums,
            "count": np.full(num * count, 32),
            "num_bytes": np.full(num * count, 10**6),
        },
    )


def _recomputed(times: int) -> list[float]:
    """Return the milliseconds of computing robust scores by stage over all kept steps, `times` times."""
    random = np.random.default_rng(1)
    kept = 1.0 + 0.02 * random.normal(size=(STEPS, len(TIMES_S), LAYOUT.pp_size, LAYOUT.world_size // LAYOUT.pp_size))
    spent_ms = []
    for _ in range(times):
        began = time.perf_counter()
        typical = np.median(kept, axis=0)
        middle = np.median(typical, axis=-1, keepdims=True)
        spread = np.median(np.abs(typical - middle), axis=-1, keepdims=True)
        scores = (typical - middle) / (1.4826 * spread)
        spent_ms.append(1e3 * (time.perf_counter() - began))
        assert np.isfinite(scores).all()
    return spent_ms
