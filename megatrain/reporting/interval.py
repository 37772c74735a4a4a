"""Averages over the steps between two step lines."""

from __future__ import annotations

import math
from collections.abc import Iterable

from megatrain.reporting.report import IntervalReport, SourceReport, StepReport
from megatrain.telemetry.flops import ComputeCost, mfu


class IntervalBuilder:
    """Collects the steps since the last line. Times are seconds of one monotonic clock."""

    def __init__(self, cost: ComputeCost) -> None:
        self._cost = cost
        self._steps: list[StepReport] = []
        self._began_at = math.nan

    @property
    def is_empty(self) -> bool:
        return not self._steps

    def add(self, report: StepReport, now: float) -> None:
        """Add a step that ended at `now`."""
        if math.isnan(self._began_at):
            # The time before the first step is preparation, not training time.
            self._began_at = now - report.duration_s
        self._steps.append(report)

    def finish(self, now: float) -> IntervalReport:
        """Return the report of the steps so far and begin the next interval."""
        steps, last = self._steps, self._steps[-1]
        wall_s = max(now - self._began_at, 1e-9)
        self._steps, self._began_at = [], now
        done = [step for step in steps if not step.is_skipped]
        tokens = [step.num_tokens for step in steps]
        per_rank = sum(tokens) / wall_s / last.world_size
        # steps of longer samples, or with more pictures, compute more for a token
        flops = _mean(
            [self._cost.flops_per_token(step.seq_len, step.num_pictures / step.global_batch_size) for step in steps],
            tokens,
        )
        return IntervalReport(
            step=last.step,
            num_steps=len(steps),
            wall_s=wall_s,
            loss=_mean([step.loss for step in done], [step.num_tokens for step in done]),
            grad_norm=_mean([step.grad_norm for step in done]),
            lr=last.lr,
            tokens_per_s=per_rank * last.world_size,
            tokens_per_s_per_rank=per_rank,
            flops_per_s_per_rank=per_rank * flops,
            mfu=None if self._cost.peak is None else mfu(per_rank, flops, self._cost.peak),
            step_ms=_mean([step.duration_s for step in steps]) * 1e3,
            data_wait_ms=_mean([step.data_wait_s for step in steps]) * 1e3,
            memory_bytes=last.memory_bytes,
            num_skipped=last.num_skipped,
            consumed_tokens=last.consumed_tokens,
            num_replaced=sum(step.num_replaced for step in done),
            sources=_source_means(done),
        )


def _source_means(steps: Iterable[StepReport]) -> tuple[SourceReport, ...]:
    """Return the mean loss of each source over its tokens; the sources in the order of their first occurrence."""
    by_name: dict[str, list[SourceReport]] = {}
    for source in (source for step in steps for source in step.sources):
        by_name.setdefault(source.name, []).append(source)
    means = []
    for name, found in by_name.items():
        with_tokens = [source for source in found if source.num_tokens]
        counts = [source.num_tokens for source in with_tokens]
        means.append(
            SourceReport(
                name=name,
                loss=_mean([source.loss for source in with_tokens], counts),
                num_tokens=sum(counts),
                num_replaced=sum(source.num_replaced for source in found),
            )
        )
    return tuple(means)


def _mean(values: list[float], weights: list[int] | None = None) -> float:
    if not values:
        return math.nan
    weights = weights or [1] * len(values)
    return math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
