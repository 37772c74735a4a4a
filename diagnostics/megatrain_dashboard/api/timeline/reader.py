"""Reads timelines from events: slices of some ranks and steps, and the complete steps from which their ideal times are
computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain_dashboard.responses.errors import TooMuchDataError
from megatrain_dashboard.sources.window import Window
from megatrain_diagnostics.analysis.ideal_timeline import IdealTimes, ideal_times
from megatrain_diagnostics.analysis.step_windows import StepEvents, plausible_spans
from megatrain_diagnostics.analysis.timeline import Timeline, lay_out
from megatrain_diagnostics.events.clocks import align
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Clocks, Spans, StepTotals, Values, joined
from megatrain_diagnostics.store.full_steps import num_stored_spans, stored_full_steps
from megatrain_diagnostics.store.reader import StoredEvents

MAX_SPANS_READ = 4_000_000
"""Limit of the spans of one request, which then take 0.4 GB of memory."""


@dataclass(frozen=True, slots=True)
class TimelineQuery:
    """Selects slices. Both end steps are included."""

    first: int
    last: int
    ranks: tuple[int, ...]
    max_slices: int


class TimelineReader:
    """Reads timelines. Thread-safe."""

    def __init__(self, events: StoredEvents) -> None:
        self._events = events

    def newest_step(self, round_number: int, within: Window) -> int | None:
        """Return the newest fully recorded step of a part of the run; None: there is none. Raises: DataError."""
        steps = [
            full_step.step
            for full_step in stored_full_steps(self._events, round_number)
            if within.holds_step(full_step.step)
        ]
        return steps[-1] if steps else None

    def read(self, roster: Roster, query: TimelineQuery, *, has_values: bool = False) -> Timeline:
        """Return the timeline. `has_values`: include the reported values of steps.

        Raises: DataError; TooMuchDataError.
        """
        where = Where((roster.round,), query.first, query.last, ranks=query.ranks)
        count = num_stored_spans(self._events, where)
        if count > MAX_SPANS_READ:
            raise TooMuchDataError(
                f"first={query.first}, last={query.last}: the ranks have {count:,} spans in these steps, more than "
                f"{MAX_SPANS_READ:,}; choose fewer steps or ranks"
            )
        spans, notes = plausible_spans(self._events, roster, self._events.read(Spans, where))
        values = joined(Values, [])
        if has_values:
            values = align(self._events.read(Values, where), self._events.read(Clocks), roster.hosts)
        events = StepEvents(roster, spans, joined(StepTotals, []), notes)
        return lay_out(events, values, query.first, query.last, query.max_slices)

    def ideal(self, timeline: Timeline, query: TimelineQuery, job: str) -> IdealTimes:
        """Return the ideal times of a timeline's slices.

        They are computed from all ranks of its steps, or, where these have too many spans, from all ranks of the drawn
        pipelines.

        Raises: DataError where no step was recorded in full; TooMuchDataError.
        """
        roster = timeline.roster
        where = Where((roster.round,), query.first, query.last)
        if num_stored_spans(self._events, where) > MAX_SPANS_READ:
            layout = roster.layout
            drawn = {roster.coordinate(track.rank)["dp"] for track in timeline.tracks}
            ranks = [rank for rank in range(layout.world_size) if layout.coordinate(rank)["dp"] in drawn]
            where = Where((roster.round,), query.first, query.last, ranks=tuple(ranks))
            count = num_stored_spans(self._events, where)
            if count > MAX_SPANS_READ:
                raise TooMuchDataError(
                    f"the ideal timeline of these slices needs {count:,} spans, more than {MAX_SPANS_READ:,}; "
                    "choose one step, or ranks of fewer pipelines"
                )
        whole, _ = plausible_spans(self._events, roster, self._events.read(Spans, where))
        return ideal_times(timeline.spans, whole, roster, job)
