"""Live detection of stragglers in a synthetic job, step by step."""

from __future__ import annotations

from collections.abc import Callable

from megatrain.contracts.black_box.operations import Operation
from megatrain_diagnostics.analysis.findings import StragglerAssessment, Thresholds
from megatrain_diagnostics.analysis.live import LiveDetection
from tests.helpers.synthetic_steps import Array, SyntheticJob


def watch_job(
    job: SyntheticJob,
    num_steps: int,
    before: Callable[[int], object] = lambda step: None,
    extra: Callable[[int], dict[Operation, Array] | None] = lambda step: None,
) -> tuple[LiveDetection, dict[int, StragglerAssessment]]:
    """Stream the steps of a job; return the detection, and its assessment after each step.

    `before` is called with each step, and may change the job; `extra` returns the seconds of other operations by rank.
    """
    live, assessments = LiveDetection(job.roster(), Thresholds()), {}
    for step in range(num_steps):
        before(step)
        totals, values = job.step(step, extra(step))
        live.add_values(values)
        live.add_totals(totals, float(step))
        live.advance(float(step))
        assessments[step] = live.assessment
    return live, assessments
