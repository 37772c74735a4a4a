"""Keeps a bounded number of the newest spans, which the controller uses to check a suspicion."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.analysis.peers import Floats
from megatrain_diagnostics.analysis.whatif import gain_without, make_model
from megatrain_diagnostics.analysis.whatif.from_spans import SPAN_OPERATIONS, operations_of
from megatrain_diagnostics.analysis.workload import pass_correlations
from megatrain_diagnostics.events.clocks import align
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.source import in_order
from megatrain_diagnostics.events.tables import Clocks, Spans, joined, num_rows, select

_MAX_ROWS = 200_000
"""Limit of rows. What-if analysis of as many rows takes about a second."""
_MAX_CLOCK_ROWS = 20_000


class SpanWindow:
    """Spans of one round; only operations that the what-if model and the correlations need."""

    def __init__(self) -> None:
        self._parts: deque[Spans] = deque()
        self._clocks: deque[Clocks] = deque()
        self._num_rows = self._num_clock_rows = 0
        self._correlations: Floats | None = None

    def add(self, spans: Spans) -> None:
        kept = select(spans, np.isin(spans.operation, SPAN_OPERATIONS))
        if not num_rows(kept):
            return
        self._parts.append(kept)
        self._num_rows += num_rows(kept)
        self._correlations = None
        while self._num_rows > _MAX_ROWS and len(self._parts) > 1:
            self._num_rows -= num_rows(self._parts.popleft())

    def add_clocks(self, clocks: Clocks) -> None:
        self._clocks.append(clocks)
        self._num_clock_rows += num_rows(clocks)
        while self._num_clock_rows > _MAX_CLOCK_ROWS and len(self._clocks) > 1:
            self._num_clock_rows -= num_rows(self._clocks.popleft())

    def correlations(self, num_ranks: int) -> Floats:
        """Return the correlation of forward and backward time of the same micro-batch. Shape: [ranks]."""
        if self._correlations is None:
            self._correlations = pass_correlations(joined(Spans, list(self._parts)), num_ranks)
        return self._correlations

    def gain_without(self, ranks: Sequence[int], first_step: int, roster: Roster) -> float | None:
        """Return how much shorter a step from `first_step` on would be if these ranks were as fast as the others.

        None if no such step was recorded in full. Units: seconds per step.
        """
        spans = in_order(joined(Spans, list(self._parts)))
        spans = select(spans, spans.step >= first_step)
        if not num_rows(spans):
            return None
        try:
            spans = align(spans, joined(Clocks, list(self._clocks)), roster.hosts)
            return gain_without(make_model(*operations_of(spans, roster, "")), ranks)
        except DataError:
            return None  # spans of some of the ranks are missing
