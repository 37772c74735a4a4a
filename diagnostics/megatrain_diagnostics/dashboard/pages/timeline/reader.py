"""Timelines read from the events: slices of some ranks and steps, and the whole steps that their ideal is made of."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.analysis.ideal_timeline import IdealTimes, ideal_times
from megatrain_diagnostics.analysis.step_windows import StepEvents, fit_spans
from megatrain_diagnostics.analysis.timeline import Timeline, lay_out
from megatrain_diagnostics.dashboard.sources.window import Window
from megatrain_diagnostics.events.clocks import align
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Clocks, Spans, StepTotals, Values, joined
from megatrain_diagnostics.store.full_steps import full_steps_told, num_spans_told
from megatrain_diagnostics.store.reader import StoredEvents

MOST_SPANS_READ = 4_000_000
"""Of one question: 0.4 GB while it is answered."""


class TooManySpansError(DataError):
    """The question is of more spans than are read at once."""


@dataclass(frozen=True, slots=True)
class TimelineQuery:
    """Which slices; steps with both ends included."""

    first: int
    last: int
    ranks: tuple[int, ...]
    max_slices: int


class TimelineReader:
    """Reads timelines. For any threads."""

    def __init__(self, events: StoredEvents) -> None:
        self._events = events

    def newest_step(self, round_number: int, within: Window) -> int | None:
        """Return the newest step of a part that was recorded in full; None: there is none. Raises: DataError."""
        steps = [one.step for one in full_steps_told(self._events, round_number) if within.holds_step(one.step)]
        return steps[-1] if steps else None

    def read(self, roster: Roster, query: TimelineQuery, *, has_values: bool = False) -> Timeline:
        """Return the timeline; with the numbers that steps came to only where they are asked for.

        Raises: DataError; TooManySpansError.
        """
        where = Where((roster.round,), query.first, query.last, ranks=query.ranks)
        count = num_spans_told(self._events, where)
        if count > MOST_SPANS_READ:
            raise TooManySpansError(
                f"first={query.first}, last={query.last}: {count:,} spans of {len(query.ranks):,} ranks are more than "
                f"{MOST_SPANS_READ:,}; choose fewer steps or ranks"
            )
        spans, notes = fit_spans(self._events, roster, self._events.read(Spans, where))
        values = joined(Values, [])
        if has_values:
            values = align(self._events.read(Values, where), self._events.read(Clocks), roster.hosts)
        events = StepEvents(roster, spans, joined(StepTotals, []), notes)
        return lay_out(events, values, query.first, query.last, query.max_slices)

    def ideal(self, timeline: Timeline, query: TimelineQuery, job: str) -> IdealTimes:
        """Return the ideal of a timeline's slices, by all ranks of its steps, or, where these are too many, by all of
        the pipelines that are drawn.

        Raises: DataError where no step was recorded in full; TooManySpansError.
        """
        roster = timeline.roster
        where = Where((roster.round,), query.first, query.last)
        if num_spans_told(self._events, where) > MOST_SPANS_READ:
            layout = roster.layout
            drawn = {roster.coordinate(track.rank)["dp"] for track in timeline.tracks}
            ranks = [rank for rank in range(layout.world_size) if layout.coordinate(rank)["dp"] in drawn]
            where = Where((roster.round,), query.first, query.last, ranks=tuple(ranks))
            count = num_spans_told(self._events, where)
            if count > MOST_SPANS_READ:
                raise TooManySpansError(
                    f"the ideal of these slices takes {count:,} spans, more than {MOST_SPANS_READ:,}; "
                    "choose one step, or ranks of fewer pipelines"
                )
        whole, _ = fit_spans(self._events, roster, self._events.read(Spans, where))
        return ideal_times(timeline.spans, whole, roster, job)
