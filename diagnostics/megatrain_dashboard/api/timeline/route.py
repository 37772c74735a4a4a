"""/timeline and below: the operations of some ranks in some steps, slice by slice."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.errors import DataError
from megatrain_dashboard.api.timeline.document import TimelineStepsDocument
from megatrain_dashboard.api.timeline.reader import TimelineQuery, TimelineReader
from megatrain_dashboard.api.timeline.view import default_ranks, ideal_picture, steps_document, timeline_picture
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import ARRAYS_TYPE
from megatrain_dashboard.responses.errors import bad_query, not_found
from megatrain_dashboard.responses.heavy import Download
from megatrain_dashboard.responses.query_parameters import From, RoundNumber, Step, To, check_steps, rank_list
from megatrain_dashboard.sources.window import Window
from megatrain_diagnostics.analysis.chrome_trace import chrome_trace
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.store.full_steps import stored_full_steps

_MAX_SLICES = 100_000
_MAX_TRACE_SLICES = 500_000
_MAX_RANKS = 4096
_MAX_TEXT = 20_000
_FRESH_S = 1.0


class SliceChoice:
    """Selects slices: the parameters that all routes except one share."""

    def __init__(
        self,
        round_number: RoundNumber = None,
        first: Step = None,
        last: Step = None,
        ranks: Annotated[
            str, Query(max_length=_MAX_TEXT, description="ranks such as 0:7,16; empty: ranks around `rank`")
        ] = "",
        rank: Annotated[int | None, Query(ge=0)] = None,
        begin: From = "",
        end: To = "",
        max_slices: Annotated[int, Query(ge=1, le=_MAX_TRACE_SLICES)] = _MAX_SLICES,
    ) -> None:
        check_steps(first, last)
        self.round, self.first, self.last = round_number, first, last
        self.ranks, self.rank, self.max_slices = ranks, rank, max_slices
        self.begin, self.end = begin, end

    @property
    def key(self) -> tuple[object, ...]:
        return (self.round, self.first, self.last, self.ranks, self.rank, self.max_slices)


Choice = Annotated[SliceChoice, Depends()]


class _TimelineQueries:
    """Data that all routes of the timeline read from the source."""

    def __init__(self, parts: DashboardParts) -> None:
        self._parts = parts
        self.reader = TimelineReader(parts.source.events)

    def version(self) -> int:
        """Return a number that grows when new data arrives."""
        return self._parts.source.live().versions["timeline"]

    def window_of(self, choice: SliceChoice) -> Window:
        """Return the part of the run that the request names."""
        return self._parts.window(choice.begin, choice.end, choice.first, choice.last)

    def asked(self, choice: SliceChoice) -> tuple[Roster, TimelineQuery]:
        """Return the round and the query. Where the request names no step, it is the newest fully recorded one."""
        roster = self._parts.source.roster(choice.round)
        first = choice.last if choice.first is None else choice.first
        if first is None:
            first = self.reader.newest_step(roster.round, self.window_of(choice))
        if first is None:
            raise not_found(
                f"round {roster.round}: no step {_of_range(choice)}was recorded span by span; one step in "
                "diagnostics.sample_period is, and `megatrain diag set` records all steps for a time"
            )
        last = first if choice.last is None else choice.last
        return roster, TimelineQuery(first, last, _ranks(choice, roster), choice.max_slices)


def router(parts: DashboardParts) -> APIRouter:
    """Return the routes that answer with the timeline: its steps, slices, ideal times, and a trace to download."""
    routes = APIRouter(dependencies=[parts.heavy_query])
    queries = _TimelineQueries(parts)

    @routes.get("/timeline/steps", response_model=TimelineStepsDocument)
    def steps(request: Request, round_number: RoundNumber = None, begin: From = "", end: To = "") -> Response:
        """Return the steps of a part of the run that were recorded in full."""
        window = parts.window(begin, end)

        def make() -> TimelineStepsDocument:
            number = parts.source.roster(round_number).round
            found = [
                full_step
                for full_step in stored_full_steps(parts.source.events, number)
                if window.holds_step(full_step.step)
            ]
            return steps_document(number, found)

        key = ("timeline/steps", queries.version(), round_number, window)
        return parts.responses.answer(request, key, make, fresh_s=_FRESH_S)

    @routes.get("/timeline", response_class=Response, responses={200: {"content": {ARRAYS_TYPE: {}}}})
    def timeline(request: Request, choice: Choice) -> Response:
        """Return the slices, tracks and arrows; by default those of the newest fully recorded step."""

        def make() -> bytes:
            roster, query = queries.asked(choice)
            found = queries.reader.read(roster, query)
            if not found.num_slices:
                raise not_found(
                    f"no span of steps {query.first} to {query.last} of these ranks is known; /timeline/steps lists "
                    "the steps that were recorded in full"
                )
            return timeline_picture(found, query.first, query.last, query.ranks)

        key = ("timeline", queries.version(), *choice.key, queries.window_of(choice))
        return parts.responses.answer(request, key, make, fresh_s=_FRESH_S)

    @routes.get("/timeline/ideal", response_class=Response, responses={200: {"content": {ARRAYS_TYPE: {}}}})
    def ideal(request: Request, choice: Choice) -> Response:
        """Return the times of the slices of /timeline, in their order, without stragglers, and the critical path."""

        def make() -> bytes:
            roster, query = queries.asked(choice)
            found = queries.reader.read(roster, query)
            try:
                return ideal_picture(found, queries.reader.ideal(found, query, parts.source.job), "")
            except DataError as error:
                return ideal_picture(found, None, str(error))

        key = ("timeline/ideal", queries.version(), *choice.key, queries.window_of(choice))
        return parts.responses.answer(request, key, make, fresh_s=_FRESH_S)

    @routes.get(
        "/timeline/trace.json.gz",
        response_class=Response,
        responses={200: {"content": {"application/gzip": {}}}},
        dependencies=[parts.download],
    )
    def trace(choice: Choice) -> Download:
        """Return the slices as a Chrome trace, which Perfetto opens, with the notes of that time."""
        roster, query = queries.asked(choice)
        found = queries.reader.read(roster, query, has_values=True)
        name = f"timeline-{roster.round}-{query.first}-{query.last}.json.gz"
        return Download(gzipped(chrome_trace(found, parts.source.facts().notes)), "application/gzip", name)

    return routes


def _of_range(choice: SliceChoice) -> str:
    return "of this range " if choice.begin or choice.end else ""


def gzipped(pieces: Iterable[str]) -> Generator[bytes]:
    """Yield pieces of text as pieces of a gzip file."""
    packer = zlib.compressobj(5, zlib.DEFLATED, 31)  # 16 + 15: a gzip header, the largest window
    for piece in pieces:
        packed = packer.compress(piece.encode())
        if packed:
            yield packed
    yield packer.flush()


def _ranks(choice: SliceChoice, roster: Roster) -> tuple[int, ...]:
    world_size = roster.layout.world_size
    if choice.rank is not None and choice.rank >= world_size:
        raise bad_query("rank", choice.rank, f"there are ranks 0 to {world_size - 1}")
    ranks = rank_list(choice.ranks, _MAX_RANKS)
    if ranks is not None and ranks[-1] >= world_size:
        raise bad_query("ranks", choice.ranks, f"there are ranks 0 to {world_size - 1}")
    return ranks or default_ranks(roster.layout, choice.rank)
