"""Finds the ranks that made a job slow, from stored events, which are read a few steps at a time.

The result is the same as that of live detection. It covers the newest 500 steps, unless other steps are requested.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.errors import DataError
from megatrain_diagnostics.analysis.device_evidence import with_devices
from megatrain_diagnostics.analysis.findings import Thresholds
from megatrain_diagnostics.analysis.straggler_history import STEPS_AT_ONCE, StragglerHistory, straggler_history
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.source import EventSource, Where
from megatrain_diagnostics.events.tables import Spans, StepTotals, Values

NEWEST_STEPS = 500
_LONGEST_GAP = 64
"""Largest gap between two successive steps of a rank; after a larger gap the step number is wrong."""
_PROBES = 8
"""Approximate number of ranks from whose rows the existing steps are found."""
_ROWS_AT_ONCE = 1_000_000
_ROWS_OF_RANK = 10
"""Approximate number of sums that a rank streams per step."""


def stored_stragglers(
    source: EventSource,
    roster: Roster,
    thresholds: Thresholds,
    asked: tuple[int | None, int | None] = (None, None),
    *,
    most: int = NEWEST_STEPS,
) -> StragglerHistory:
    """Return the stragglers in the requested steps (first, last), or else in the newest `most` steps.

    Each finding includes evidence from the devices of its ranks.
    Raises: DataError if there are no stored sums of such steps.
    """
    first, last = step_range(source, roster, asked, most)
    round_number = roster.round
    found = straggler_history(
        roster,
        thresholds,
        lambda: _steps(source, roster, first, last),
        lambda ranks: _passes(source, round_number, first, last, ranks),
    )
    return replace(found, findings=tuple(with_devices(source, finding, round_number) for finding in found.findings))


def step_range(
    source: EventSource, roster: Roster, asked: tuple[int | None, int | None], most: int = NEWEST_STEPS
) -> tuple[int, int]:
    """Return the first and last step to analyze: the newest `most` steps, unless other steps are requested.

    Raises: DataError if there are no stored sums of such steps.
    """
    known = sorted(roster.hosts)
    probes = tuple(known[:: max(1, len(known) // _PROBES)])
    rows = source.read(StepTotals, Where((roster.round,), asked[0], asked[1], probes, (Operation.STEP.number,)))
    if not len(rows.step):
        newest = "the newest" if asked[1] is None else asked[1]
        between = "" if asked == (None, None) else f" between steps {asked[0] or 0} and {newest}"
        raise DataError(f"round {roster.round} has no sums of steps{between}; is streaming on (diag on)?")
    last = newest_step(rows)
    return (int(rows.step.min()) if asked[0] is not None else max(int(rows.step.min()), last - most + 1)), last


def newest_step(rows: StepTotals) -> int:
    """Return the newest step of the ranks, ignoring wrong step numbers of a few ranks or rows."""
    newest = []
    for rank in np.unique(rows.rank).tolist():
        steps = np.unique(rows.step[rows.rank == rank]).astype(np.int64)
        near = np.flatnonzero(np.diff(steps) <= _LONGEST_GAP)
        newest.append(int(steps[near[-1] + 1] if len(near) else steps[0]))
    # a quarter of the ranks may report wrong numbers; of three or fewer, all except one may be silent
    return sorted(newest)[(len(newest) - 1) * 3 // 4 if len(newest) > 3 else -1]


def _steps(source: EventSource, roster: Roster, first: int, last: int) -> Iterator[tuple[StepTotals, Values]]:
    # a read has a fixed cost, so in a small job more steps are read at once
    at_once = max(STEPS_AT_ONCE, _ROWS_AT_ONCE // (_ROWS_OF_RANK * max(1, roster.layout.world_size)))
    for begin in range(first, last + 1, at_once):
        where = Where((roster.round,), begin, min(begin + at_once - 1, last))
        yield source.read(StepTotals, where), source.read(Values, where)


def _passes(source: EventSource, round_number: int, first: int, last: int, ranks: tuple[int, ...]) -> Spans:
    passes = (Operation.FORWARD_COMPUTE.number, Operation.BACKWARD_COMPUTE.number)
    return source.read(Spans, Where((round_number,), first, last, ranks, passes))
