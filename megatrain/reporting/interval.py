"""Averages over the steps between two step lines, and the compute cost that turns tokens/s into FLOP/s and MFU."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatrain.config.config import Config
from megatrain.reporting.report import IntervalReport, StepReport
from megatrain.telemetry.flops import flops_formula, mfu, peak_flops, training_flops_per_token


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """What a token costs, and what a device could do at best in a second; `peak` None: not known."""

    flops_per_token: float
    peak: float | None
    formula: str
    """One line on how both are counted."""


def compute_cost(config: Config, device_name: str) -> ComputeCost:
    """Return the cost of a token of this model on a device of this name."""
    precision = config.train.precision
    flops_per_token = training_flops_per_token(config.model)
    # The table holds bf16 peaks only.
    peak, source = peak_flops(device_name) if precision == "bf16" else None, f"{device_name}, dense {precision}"
    if config.telemetry.peak_tflops:
        peak, source = config.telemetry.peak_tflops * 1e12, "telemetry.peak_tflops"
    if peak is None:
        known = f"not printed: no {precision} peak is known for {device_name}; set telemetry.peak_tflops"
    else:
        known = f"tokens/s/device * FLOPs/token / peak, peak = {peak / 1e12:g} TFLOP/s ({source})"
    return ComputeCost(flops_per_token, peak, f"{flops_formula(config.model)}; MFU {known}")


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
        """Add a step that has ended at `now`."""
        if math.isnan(self._began_at):
            # Before the first step there was only preparation, which is not training time.
            self._began_at = now - report.duration_s
        self._steps.append(report)

    def finish(self, now: float) -> IntervalReport:
        """Return the report of the steps so far and begin the next interval."""
        steps, last = self._steps, self._steps[-1]
        wall_s = max(now - self._began_at, 1e-9)
        self._steps, self._began_at = [], now
        done = [step for step in steps if not step.is_skipped]
        per_rank = sum(step.num_tokens for step in steps) / wall_s / last.world_size
        return IntervalReport(
            step=last.step,
            num_steps=len(steps),
            wall_s=wall_s,
            loss=_mean([step.loss for step in done], [step.num_tokens for step in done]),
            grad_norm=_mean([step.grad_norm for step in done]),
            lr=last.lr,
            tokens_per_s=per_rank * last.world_size,
            tokens_per_s_per_rank=per_rank,
            flops_per_s_per_rank=per_rank * self._cost.flops_per_token,
            mfu=None if self._cost.peak is None else mfu(per_rank, self._cost.flops_per_token, self._cost.peak),
            step_ms=_mean([step.duration_s for step in steps]) * 1e3,
            data_wait_ms=_mean([step.data_wait_s for step in steps]) * 1e3,
            memory_bytes=last.memory_bytes,
            num_skipped=last.num_skipped,
            consumed_tokens=last.consumed_tokens,
        )


def _mean(values: list[float], weights: list[int] | None = None) -> float:
    if not values:
        return math.nan
    weights = weights or [1] * len(values)
    return math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
