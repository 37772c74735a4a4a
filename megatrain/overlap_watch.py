"""Says so once when overlap is on and hides nothing, with the reason and the way out.

Decided by the sums of a rank's own steps: what the host waited for was not hidden. What it did not wait for may have
been over before it looked, so only "nothing is hidden" can be told for certain. On a device nobody knows what was
waited for, and the layout alone tells. Watched is the communication of data parallelism: a receive of a pipeline waits
for the neighbour's work, too, and that is the bubble.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
    exposed_ns: float
    total_ns: float | None
    """None where the layout says that nothing is hidden, and of exposed_ns the least is known."""


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
    reasons = {operation: structural_reason(config, layout, operation) for operation in _KINDS}
    found = not_hidden(steps, cannot_hide={operation for operation, reason in reasons.items() if reason})
    if not found:
        return ""
    step_ns = sum(step.duration_ns for step in steps) / len(steps)
    parts = [f"{_waited(one)} a step, {one.exposed_ns / step_ns:.0%} of the step" for one in found]
    given = [reasons[one.operation] for one in found if reasons[one.operation]]
    why = "; ".join(given) or "megatrain diag explain shows what a step waits for"
    out = f". {way_out(config, layout)}" if given else ""
    span = f"steps {steps[0].step + 1} to {steps[-1].step + 1}"
    return f"warning: parallel.overlap=true hid next to nothing in {span}. {'. '.join(parts)}. Why: {why}{out}"


def _waited(one: NotHidden) -> str:
    exposed = f"{one.operation.value}: waited for {one.exposed_ns / 1e6:,.3f}"
    return f"{exposed} ms at least" if one.total_ns is None else f"{exposed} of its {one.total_ns / 1e6:,.3f} ms"


def not_hidden(steps: Sequence[StepSummary], cannot_hide: Collection[Operation] = ()) -> list[NotHidden]:
    """Return the kinds that take a part of the steps and that the rank waited for nearly all of the time.

    cannot_hide: of which the layout says so. A device does not tell what it waits for; but of a reduction that nothing
    can run beneath, the longest exchange of a step was waited for. Gathers have the loading of data to run beneath.
    """
    found = []
    step_ns = sum(step.duration_ns for step in steps) / len(steps)
    for operation in _KINDS:
        totals = [step.totals[operation] for step in steps if operation in step.totals]
        if all(one.attended_ns is not None for one in totals):
            total_ns = sum(one.sum_ns for one in totals) / len(steps)
            exposed_ns = sum(one.attended_ns or 0 for one in totals) / len(steps)
            one = NotHidden(operation, exposed_ns, total_ns)
            is_hidden = total_ns - exposed_ns >= LEAST_HIDDEN * total_ns
        else:
            one = NotHidden(operation, sum(one.max_ns for one in totals) / len(steps), None)
            is_hidden = operation not in cannot_hide or operation is not Operation.GRADS_REDUCE_SCATTER
        if not is_hidden and one.exposed_ns >= LEAST_OF_STEP * step_ns:
            found.append(one)
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
