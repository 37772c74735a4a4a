"""Warns once when parallel.overlap is on but almost all communication is exposed.

The warning is based on the totals of this rank's steps: communication for which the host, or on a GPU the compute
stream, waited counts as exposed. An operation whose waits are not all known is left out. The watched operations are
the collectives of data parallelism and, with sequence chunks, those of tensor parallelism. Messages of the pipeline are
not watched: a receive also waits for the neighbor's work, which is the bubble. The dry run shows before a job starts
what its layout cannot overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatrain.config.config import Config
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout
from megatrain.telemetry.step_summary import StepSummary
from megatrain.training.observers.step_observer import CompletedStep, StepObserver

LEFT_OUT_STEPS = 5
"""The first steps are left out, because they compile, allocate and connect."""
WATCHED_STEPS = 20
MIN_OVERLAPPED = 0.1
MIN_OF_STEP = 0.03
"""Collectives that are exposed for a smaller part of a step are not reported: overlap would gain too little."""
_DATA_PARALLEL = (Operation.GRADS_REDUCE_SCATTER, Operation.PARAMS_ALL_GATHER)
_TENSOR_PARALLEL = (Operation.TP_ALL_GATHER, Operation.TP_REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Exposed:
    """One kind of communication that is almost completely exposed. Units: ns per step, means."""

    operation: Operation
    exposed_ns: float
    total_ns: float


class OverlapWatch(StepObserver):
    """Judges WATCHED_STEPS steps after the first LEFT_OUT_STEPS, and warns at most once."""

    def __init__(self, config: Config, layout: Layout, read_summary: Callable[[], StepSummary | None]) -> None:
        """read_summary: returns the totals of the last completed step, if known."""
        self._kinds = watched_kinds(config, layout)
        self._read_summary = read_summary
        self._num_steps = 0
        self._steps: list[StepSummary] = []

    def after_step(self, done: CompletedStep) -> str:
        if not self._kinds or self._num_steps == LEFT_OUT_STEPS + WATCHED_STEPS:
            return ""
        self._num_steps += 1
        summary = self._read_summary()
        if summary is not None and self._num_steps > LEFT_OUT_STEPS:
            self._steps.append(summary)
        if self._num_steps < LEFT_OUT_STEPS + WATCHED_STEPS:
            return ""
        steps, self._steps = self._steps, []
        return warning(steps, self._kinds)


def watched_kinds(config: Config, layout: Layout) -> tuple[Operation, ...]:
    """Return the collectives that this layout can overlap with compute."""
    if not config.parallel.overlap:
        return ()
    kinds = _DATA_PARALLEL if layout.has_replicas else ()
    return kinds + (_TENSOR_PARALLEL if config.parallel.num_sequence_chunks > 1 else ())


def warning(steps: Sequence[StepSummary], kinds: Sequence[Operation]) -> str:
    """Return the warning for these steps; an empty text if communication is overlapped, short or not known."""
    found = mostly_exposed(steps, kinds)
    if not found:
        return ""
    step_ns = sum(step.duration_ns for step in steps) / len(steps)
    parts = [
        f"{exposed.operation.value}: waited for {exposed.exposed_ns / 1e6:,.3f} of its "
        f"{exposed.total_ns / 1e6:,.3f} ms a step, {exposed.exposed_ns / step_ns:.0%} of the step"
        for exposed in found
    ]
    return (
        f"warning: parallel.overlap=true overlapped almost nothing in steps {steps[0].step + 1} to "
        f"{steps[-1].step + 1}. "
        f"{'. '.join(parts)}. `megatrain config check --dry-run` shows what this layout can overlap, "
        "and `megatrain diag explain` shows what a step waits for"
    )


def mostly_exposed(steps: Sequence[StepSummary], kinds: Sequence[Operation]) -> list[Exposed]:
    """Return the kinds that are almost completely exposed and take a notable part of the steps."""
    found = []
    step_ns = sum(step.duration_ns for step in steps) / len(steps)
    for operation in kinds:
        totals = [step.totals[operation] for step in steps if operation in step.totals]
        attended = [total.attended_ns for total in totals if total.attended_ns is not None]
        if len(attended) < len(totals):
            continue
        total_ns, exposed_ns = sum(total.sum_ns for total in totals) / len(steps), sum(attended) / len(steps)
        if exposed_ns > (1 - MIN_OVERLAPPED) * total_ns and exposed_ns >= MIN_OF_STEP * step_ns:
            found.append(Exposed(operation, exposed_ns, total_ns))
    return found
