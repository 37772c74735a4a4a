"""Warns once when overlap is on and hides nothing, with the reason and the way out.

Decided by the sums of a rank's own steps: what the host waited for was not hidden. What it did not wait for may have
been over before it looked, so only "nothing is hidden" is certain. On a device it is unknown what was
waited for, and the layout alone tells. Watched is the communication of data parallelism and, where it is cut in chunks,
of tensor parallelism: a receive of a pipeline waits for the neighbour's work, too, and that is the bubble.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatrain.config.config import Config
from megatrain.config.model_size import block_weights, parameters_by_part
from megatrain.contracts.layout import Layout
from megatrain.contracts.operations import Operation
from megatrain.telemetry.step_summary import StepSummary

LEFT_OUT_STEPS = 5
"""The first steps compile, allocate and meet."""
WATCHED_STEPS = 20
LEAST_HIDDEN = 0.1
LEAST_OF_STEP = 0.03
"""What takes less of a step is not worth hiding."""
_DATA_PARALLEL = (Operation.GRADS_REDUCE_SCATTER, Operation.PARAMS_ALL_GATHER)
_TENSOR_PARALLEL = (Operation.TP_ALL_GATHER, Operation.TP_REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class NotHidden:
    """One kind of communication of which next to nothing is hidden. Units: ns a step, means."""

    operation: Operation
    exposed_ns: float
    total_ns: float | None
    """None where the layout says that nothing is hidden, and of exposed_ns the least is known."""


class OverlapWatch:
    """Looks at the steps after the first ones, and speaks once at most."""

    def __init__(self, config: Config, layout: Layout, stage: int) -> None:
        self._config = config
        self._layout = layout
        self._stage = stage
        self._num_steps = 0
        self._steps: list[StepSummary] = []
        self._is_over = not config.parallel.overlap or not watched_kinds(config, layout)

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
        return warning(self._config, self._layout, self._stage, steps)


def watched_kinds(config: Config, layout: Layout) -> tuple[Operation, ...]:
    """Return what overlap is to hide in this layout."""
    kinds = _DATA_PARALLEL if layout.has_replicas else ()
    return kinds + (_TENSOR_PARALLEL if config.parallel.num_sequence_chunks > 1 else ())


def warning(config: Config, layout: Layout, stage: int, steps: Sequence[StepSummary]) -> str:
    """Return the warning for these steps of a rank of `stage`; nothing where communication is hidden, short or
    unknown."""
    reasons = {kind: structural_reason(config, layout, stage, kind) for kind in watched_kinds(config, layout)}
    found = not_hidden(steps, reasons)
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


def not_hidden(steps: Sequence[StepSummary], reasons: Mapping[Operation, str]) -> list[NotHidden]:
    """Return the kinds that take a part of the steps and that the rank waited for nearly all of the time.

    reasons: by kind, why the layout hides nothing of it. A device does not tell what it waits for; but of a reduction
    that overlaps with nothing, the rank waited for the longest exchange of a step. Gathers overlap with the loading of
    data.
    """
    found = []
    step_ns = sum(step.duration_ns for step in steps) / len(steps)
    for operation, reason in reasons.items():
        totals = [step.totals[operation] for step in steps if operation in step.totals]
        if all(one.attended_ns is not None for one in totals):
            total_ns = sum(one.sum_ns for one in totals) / len(steps)
            exposed_ns = sum(one.attended_ns or 0 for one in totals) / len(steps)
            one = NotHidden(operation, exposed_ns, total_ns)
            is_hidden = total_ns - exposed_ns >= LEAST_HIDDEN * total_ns
        else:
            one = NotHidden(operation, sum(one.max_ns for one in totals) / len(steps), None)
            is_hidden = not reason or operation is not Operation.GRADS_REDUCE_SCATTER
        if not is_hidden and one.exposed_ns >= LEAST_OF_STEP * step_ns:
            found.append(one)
    return found


def structural_reason(config: Config, layout: Layout, stage: int, operation: Operation) -> str:
    """Return why nothing of it can be hidden in this layout, whatever the speed; nothing where it could.

    Later stages of a pipeline idle before their first forward and after their last backward, the first one does not.
    Of several chunks one is communicated beneath another.
    """
    if config.parallel.num_chunks > 1 or stage > 0 or operation not in _DATA_PARALLEL:
        return ""
    bucket_size = config.bucket_size(layout.dp_size)
    if config.kernels.cuda_graphs:
        where = "with kernels.cuda_graphs=true"
    elif bucket_size >= _first_chunk_numel(config, layout):
        where = f"with one bucket of {bucket_size:,} elements or more"
    else:
        return ""
    if operation is Operation.PARAMS_ALL_GATHER:
        return f"{where} all parameters are gathered before the first forward"
    if config.parallel.zero_stage == 2 and config.num_microbatches(layout.dp_size) > 1:
        return ""  # each micro-batch's gradients may travel during the next forward
    return f"{where} the whole gradient is reduced after the last backward"


def _first_chunk_numel(config: Config, layout: Layout) -> int:
    """Return about how many parameters a rank of the first stage has, which is one chunk."""
    size = parameters_by_part(config.model)
    ends = size.embedding + size.position + (size.head + size.final_norm if layout.pp_size == 1 else 0)
    return (ends + size.block * config.layers_per_chunk[0]) // layout.tp_size


def way_out(config: Config, layout: Layout) -> str:
    """Return which key lets a stage compute during its communication."""
    if config.kernels.cuda_graphs:
        return "Use kernels.cuda_graphs=false"
    return f"Use parallel.bucket_size={block_weights(config.model) // layout.tp_size}, the matrices of a layer"
