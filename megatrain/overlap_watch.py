"""Says so once when overlap is on and hides nothing, with the reason and the way out.

Decided by the sums of a rank's own steps: what the host waited for was not hidden. What it did not wait for may have
been over before it looked, so only "nothing is hidden" can be told for certain. Watched is the communication of data
parallelism: a receive of a pipeline waits for the neighbour's work, too, and that is the bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.contracts.operations import Operation
from megatrain.telemetry.step_summary import StepSummary

LEFT_OUT_STEPS = 5
"""The first steps compile, allocate and meet."""
WATCHED_STEPS = 20
LEAST_HIDDEN = 0.1
LEAST_OF_STEP = 0.03
"""What takes less of a step is not worth hiding."""
_KINDS = (Operation.GRADS_REDUCE_SCATTER, Operation.PARAMS_ALL_GATHER)
_MOST_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class NotHidden:
    """One kind of communication of which next to nothing is hidden. Units: ns a step, means."""

    operation: Operation
    total_ns: float
    attended_ns: float


class OverlapWatch:
    """Looks at the steps after the first ones, and speaks once at most."""

    def __init__(self, config: Config, layout: Layout) -> None:
        self._config = config
        self._layout = layout
        self._num_steps = 0
        self._steps: list[StepSummary] = []
        self._is_over = not config.parallel.overlap or layout.dp_size == 1

    def after_step(self, summary: StepSummary) -> str:
        """Take in a step. Return what is to be said, once."""
        if self._is_over:
            return ""
        self._num_steps += 1
        if self._num_steps > LEFT_OUT_STEPS:
            self._steps.append(summary)
        if len(self._steps) < WATCHED_STEPS:
            return ""
        steps, self._steps, self._is_over = self._steps, [], True
        return warning(self._config, self._layout, steps)


def warning(config: Config, layout: Layout, steps: Sequence[StepSummary]) -> str:
    """Return what is to be said of these steps of one rank; nothing where communication is hidden, short or untold."""
    found = not_hidden(steps)
    if not found:
        return ""
    step_ns = sum(step.duration_ns for step in steps) / len(steps)
    parts = [
        f"{one.operation.value}: waited for {one.attended_ns / 1e6:,.3f} of its {one.total_ns / 1e6:,.3f} ms a step, "
        f"{one.attended_ns / step_ns:.0%} of the step"
        for one in found
    ]
    reasons = [reason for one in found if (reason := structural_reason(config, layout, one.operation))]
    why = "; ".join(reasons) or "megatrain diag explain shows what a step waits for"
    out = f". {way_out(config, layout)}" if reasons else ""
    span = f"steps {steps[0].step + 1} to {steps[-1].step + 1}"
    return f"warning: parallel.overlap=true hid next to nothing in {span}. {'. '.join(parts)}. Why: {why}{out}"


def not_hidden(steps: Sequence[StepSummary]) -> list[NotHidden]:
    """Return the kinds that take a part of the steps and that the host waited for nearly all of the time."""
    found = []
    step_ns = sum(step.duration_ns for step in steps) / len(steps)
    for operation in _KINDS:
        totals = [step.totals[operation] for step in steps if operation in step.totals]
        total_ns = sum(one.sum_ns for one in totals) / len(steps)
        attended = [one.attended_ns for one in totals]
        if None in attended or not total_ns:
            continue
        attended_ns = sum(one for one in attended if one is not None) / len(steps)
        if total_ns - attended_ns < LEAST_HIDDEN * total_ns and attended_ns >= LEAST_OF_STEP * step_ns:
            found.append(NotHidden(operation, total_ns, attended_ns))
    return found


def structural_reason(config: Config, layout: Layout, operation: Operation) -> str:
    """Return why nothing of it can be hidden in this layout, whatever the speed; nothing where it could."""
    parallel = config.parallel
    if parallel.num_chunks > 1 or layout.pp_size > 1:
        return ""
    if operation is Operation.PARAMS_ALL_GATHER:
        return "with parallel.num_chunks=1 and pp_size=1 all parameters are gathered before the first forward"
    if parallel.zero_stage == 2 and config.num_microbatches(layout.dp_size) > 1:
        return ""  # each micro-batch's gradients may travel beneath the next forward
    return "with parallel.num_chunks=1 and pp_size=1 the whole gradient is reduced after the last backward"


def way_out(config: Config, layout: Layout) -> str:
    """Return which keys let a stage compute beneath its communication."""
    num_layers = config.model.num_layers // layout.pp_size
    fitting = [count for count in range(_MOST_CHUNKS, 1, -1) if num_layers % count == 0]
    if not fitting:
        return f"model.num_layers={config.model.num_layers} that 2, 3 or 4 divides would allow parallel.num_chunks > 1"
    chunks = f'parallel.num_chunks={fitting[0]} with parallel.schedule="interleaved"'
    has_limit = config.parallel.zero_stage == 2 and config.model.has_tied_head
    return f"Use {chunks}{' and parallel.zero_stage=1' if has_limit else ''}"
