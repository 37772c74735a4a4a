"""Keeps a bounded number of the newest spans, which the controller uses to check a suspicion."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.analysis.whatif import gain_without, make_model
from megatrain_diagnostics.analysis.whatif.from_spans import SPAN_OPERATIONS, operations_of
from megatrain_diagnostics.analysis.workload import pass_correlations
from megatrain_diagnostics.events.clocks import align
from megatrain_diagnostics.events.newest_tables import NewestTables
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.source import in_order
from megatrain_diagnostics.events.tables import Clocks, Float64, Spans, joined, num_rows, select

_MAX_ROWS = 200_000
"""Limit of rows. What-if analysis of as many rows takes about a second."""
_MAX_CLOCK_ROWS = 20_000


class SpanWindow:
    """Spans of one round; only operations that the what-if model and the correlations need."""

    def __init__(self) -> None:
        self._spans = NewestTables[Spans](_MAX_ROWS)
        self._clocks = NewestTables[Clocks](_MAX_CLOCK_ROWS)
        self._correlations: Float64 | None = None

    def add(self, spans: Spans) -> None:
        kept = select(spans, np.isin(spans.operation, SPAN_OPERATIONS))
        if num_rows(kept):
            self._spans.add(kept)
            self._correlations = None

    def add_clocks(self, clocks: Clocks) -> None:
        self._clocks.add(clocks)

    def correlations(self, num_ranks: int) -> Float64:
        """Return the correlation of forward and backward time of the same micro-batch. Shape: [ranks]."""
        if self._correlations is None:
            self._correlations = pass_correlations(joined(Spans, self._spans.tables), num_ranks)
        return self._correlations

    def gain_without(self, ranks: Sequence[int], first_step: int, roster: Roster) -> float | None:
        """Return how much shorter a step from `first_step` on would be if these ranks were as fast as the others.

        None if spans of such a step are missing. Units: seconds per step.
        """
        spans = in_order(joined(Spans, self._spans.tables))
        spans = select(spans, spans.step >= first_step)
        if not num_rows(spans):
            return None
        try:
            spans = align(spans, joined(Clocks, self._clocks.tables), roster.hosts)
            return gain_without(make_model(*operations_of(spans, roster, "")), ranks)
        except DataError:
            return None  # spans of some of the ranks are missing
