"""Runs live detection on stored steps, from the first to the last."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from megatrain.contracts.records.host_verdict import Cause, VerdictConfidence
from megatrain_diagnostics.analysis.findings import Finding, StragglerAssessment, Thresholds
from megatrain_diagnostics.analysis.live import LiveDetection
from megatrain_diagnostics.analysis.workload import MIN_WORK_CORRELATION, pass_correlations
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.tables import Spans, StepTotals, Values, num_rows, select

STEPS_AT_ONCE = 16
_FOREVER_S = 1e18


@dataclass(frozen=True, slots=True)
class StragglerHistory:
    """The results. `findings`: those that lasted long enough at any time, each with its first and last step."""

    findings: tuple[Finding, ...]
    ended: frozenset[str]
    """Keys of the findings that have ended before the last step."""
    assessment: StragglerAssessment
    """The assessment after the last step."""
    num_compared: int
    num_wrong: int
    """Rows that were rejected: an impossible rank, step, operation or duration."""


Steps = Iterable[tuple[StepTotals, Values]]


def straggler_history(
    roster: Roster, thresholds: Thresholds, steps: Callable[[], Steps], spans_of: Callable[[tuple[int, ...]], Spans]
) -> StragglerHistory:
    """Return the stragglers in some steps. `steps` yields parts in the order of steps, and may be called twice.

    `spans_of` returns the stored forward and backward spans of some ranks. If the forward and backward times of a rank
    correlate, it is slow because of its samples, even if the reported lengths of documents do not show that.
    """
    found = _run(roster, thresholds, steps(), np.zeros(roster.layout.world_size))
    suspects = tuple(
        sorted({rank for finding in found.findings if finding.cause is Cause.COMPUTE for rank in finding.ranks})
    )
    if not suspects:
        return found
    correlations = pass_correlations(spans_of(suspects), roster.layout.world_size)
    return _run(roster, thresholds, steps(), correlations) if (correlations >= MIN_WORK_CORRELATION).any() else found


def _run(roster: Roster, thresholds: Thresholds, steps: Steps, correlations: np.ndarray) -> StragglerHistory:
    live = LiveDetection(roster, thresholds, deadline_s=1.0)
    live.correlations = correlations
    seen: dict[str, Finding] = {}
    for totals, values in steps:
        for part, worth in _by_steps(totals, values):
            live.add_totals(part, 0.0)
            live.add_values(worth)
            while live.advance(0.0, at_most=1):
                _record_findings(seen, live.assessment, thresholds)
    while live.advance(_FOREVER_S, at_most=1):
        _record_findings(seen, live.assessment, thresholds)
    live.assess()
    _record_findings(seen, live.assessment, thresholds)
    now = {finding.key for finding in live.assessment.findings}
    return StragglerHistory(
        findings=tuple(
            sorted(
                seen.values(), key=lambda finding: (finding.confidence is not VerdictConfidence.HIGH, -finding.gain_s)
            )
        ),
        ended=frozenset(set(seen) - now),
        assessment=replace(live.assessment, silent_ranks=live.silent_ranks()),
        num_compared=live.num_compared,
        num_wrong=live.ring.counters.num_wrong,
    )


def _by_steps(totals: StepTotals, values: Values) -> Iterable[tuple[StepTotals, Values]]:
    """Split into parts of at most STEPS_AT_ONCE steps, because the ring has space for few steps."""
    if not num_rows(totals):
        return
    first, last = int(totals.step.min()), int(totals.step.max())
    if last - first < STEPS_AT_ONCE:
        yield totals, values
        return
    for number in np.unique(totals.step // STEPS_AT_ONCE).tolist():
        yield (
            select(totals, totals.step // STEPS_AT_ONCE == number),
            select(values, values.step // STEPS_AT_ONCE == number),
        )


def _record_findings(seen: dict[str, Finding], assessment: StragglerAssessment, thresholds: Thresholds) -> None:
    for finding in assessment.findings:
        is_high = finding.confidence is VerdictConfidence.HIGH
        if not is_high and finding.num_seen < 2 * thresholds.num_steps:
            continue
        before = seen.get(finding.key)
        if before is not None and before.confidence is VerdictConfidence.HIGH and not is_high:
            seen[finding.key] = replace(before, last_step=finding.last_step)
        else:
            first = finding.first_step if before is None else min(before.first_step, finding.first_step)
            seen[finding.key] = replace(finding, first_step=first)
