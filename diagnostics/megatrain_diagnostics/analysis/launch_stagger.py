"""Measures signs of drift in sampled steps: launch stagger, issue latency, void time.

Launch stagger: the time from the first to the last start of a reduce-scatter among the ranks of its group. If it grows
over the steps, the step time grows although no computation takes longer (MegaScale sec. 5.1). Issue latency: the time
from the launch by the CPU thread to the start on the device; if it is near zero, the device waits for the CPU. Void:
the fraction of the step in which no timed operation ran. Issue latency and void are those of XPUTimer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatrain.contracts.black_box.operations import Operation, operation_name
from megatrain.contracts.black_box.values import RecordFlag
from megatrain_diagnostics.analysis.exchanges import find_exchanges
from megatrain_diagnostics.analysis.exposure import CATEGORIES, Category, expose
from megatrain_diagnostics.analysis.step_windows import StepEvents, step_windows
from megatrain_diagnostics.analysis.trends import Trend, trend
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.tables import Float64, Int64, Spans

_PERSISTENT = 0.5
_MIN_EXCHANGES = 8


@dataclass(frozen=True, slots=True)
class Stagger:
    """The time from the first to the last start of a reduce-scatter among its ranks. Units: s."""

    num_exchanges: int
    median_s: float
    largest_s: float
    trend: Trend | None
    """Trend of the mean stagger over the steps."""
    last_rank: int
    """The rank that began last most often."""
    last_host: str
    last_share: float
    """Fraction of the exchanges of its group in which this rank began last."""
    by_chance: float
    """Fraction expected by chance: 1 / number of members of that group."""

    @property
    def is_persistent(self) -> bool:
        """Whether mostly the same rank is last, so that it is a straggler; otherwise the stagger fluctuates."""
        beyond_chance = (self.last_share - self.by_chance) / (1.0 - self.by_chance)
        return beyond_chance >= _PERSISTENT and self.num_exchanges >= _MIN_EXCHANGES


@dataclass(frozen=True, slots=True)
class IssueLatency:
    """The time from launch by the CPU thread to start on the device, for one operation. Units: s."""

    operation: str
    count: int
    median_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class LaunchSample:
    """Measurements of one sampled step."""

    step: int
    spreads_s: Float64
    """Last start minus first start of each reduce-scatter."""
    last_ranks: Int64
    group_ranks: tuple[tuple[int, ...], ...]
    """Members of each reduce-scatter."""
    latencies: tuple[tuple[int, Float64], ...]
    """(operation number, latencies in s)."""
    void: float
    """Void time as a fraction of the step, mean over the sampled ranks; -1: not known."""


def sample_step(spans: Spans, everything: StepEvents, step: int) -> LaunchSample:
    """Return the measurements of a step. `spans`: reduce-scatters of all ranks; `everything`: events of some ranks."""
    exchanges = find_exchanges(spans, everything.roster)
    number = Operation.GRADS_REDUCE_SCATTER.number
    is_seen = (exchanges.operation == number) & (exchanges.step == step)
    is_seen &= exchanges.num_parts == exchanges.num_members
    if len(exchanges):
        earliest = np.minimum.reduceat(spans.start_ns[exchanges.parts], exchanges.first[:-1])
    else:
        earliest = exchanges.latest_start_ns
    chosen = np.flatnonzero(is_seen)
    windows = step_windows(everything.spans, everything.totals, step, step)
    void = -1.0
    if len(windows):
        own = find_exchanges(everything.spans, everything.roster)
        spent = expose(everything.spans, own, windows).spent_ns.sum(axis=0)
        void = float(spent[CATEGORIES.index(Category.OTHER)] / spent.sum())
    return LaunchSample(
        step=step,
        spreads_s=(exchanges.latest_start_ns[chosen] - earliest[chosen]) / 1e9,
        last_ranks=spans.rank[exchanges.last_part[chosen]].astype(np.int64),
        group_ranks=tuple(tuple(exchanges.groups[group].ranks) for group in exchanges.group_of[chosen].tolist()),
        latencies=_latencies(everything, step),
        void=void,
    )


def _latencies(events: StepEvents, step: int) -> tuple[tuple[int, Float64], ...]:
    spans = events.spans
    # work that is timed by the CPU clock has no issue latency
    rows = np.flatnonzero((spans.step == step) & ((spans.flags & int(RecordFlag.DEVICE_CLOCK)) != 0))
    rows = rows[spans.duration_ns[rows] >= 0]
    waits = np.maximum(spans.start_ns[rows] - spans.launch_ns[rows], 0) / 1e9
    numbers = np.unique(spans.operation[rows]).tolist()
    return tuple((number, waits[spans.operation[rows] == number]) for number in numbers)


def stagger_of(samples: Sequence[LaunchSample], roster: Roster) -> Stagger | None:
    """Return the stagger over the samples; None if no reduce-scatter has the spans of all members."""
    seen = [sample for sample in samples if len(sample.spreads_s)]
    if not seen:
        return None
    spreads = np.concatenate([sample.spreads_s for sample in seen])
    last = np.concatenate([sample.last_ranks for sample in seen])
    groups = [group for sample in seen for group in sample.group_ranks]
    ranks, counts = np.unique(last, return_counts=True)
    most = int(ranks[np.argmax(counts)])
    own = [group for group in groups if most in group]
    return Stagger(
        num_exchanges=len(spreads),
        median_s=float(np.median(spreads)),
        largest_s=float(spreads.max()),
        trend=trend(
            np.array([float(sample.step) for sample in seen]),
            np.array([float(sample.spreads_s.mean()) for sample in seen]),
        ),
        last_rank=most,
        last_host=roster.host_of(most),
        last_share=float(counts.max() / len(own)),
        by_chance=1.0 / len(own[0]),
    )


def latencies_of(samples: Sequence[LaunchSample]) -> tuple[IssueLatency, ...]:
    """Return the issue latencies over the samples, by operation."""
    parts: dict[int, list[Float64]] = {}
    for sample in samples:
        for number, waits in sample.latencies:
            parts.setdefault(number, []).append(waits)
    found = []
    for number, arrays in sorted(parts.items()):
        waits, name = np.concatenate(arrays), operation_name(number)
        found.append(IssueLatency(name, len(waits), float(np.median(waits)), float(np.percentile(waits, 99))))
    return tuple(found)
