"""GET /grid, the picture of all ranks, /ranks/{rank} and /hang."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from fastapi import APIRouter, Path
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.errors import DataError
from megatrain.run_files.run_directory import kept_black_box
from megatrain_dashboard.api.ranks.document import HangDocument, RankDocument
from megatrain_dashboard.api.ranks.hang_source import activities_of, hang_of
from megatrain_dashboard.api.ranks.picture_view import HangPicture, ranks_picture
from megatrain_dashboard.api.ranks.view import RankInputs, hang_document, rank_document
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import ARRAYS_TYPE
from megatrain_dashboard.responses.errors import not_found
from megatrain_dashboard.responses.query_parameters import RoundNumber, check_round
from megatrain_dashboard.sources.protocol import JobSource
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Ranks, Spans, Stacks, StepTotals, joined, num_rows
from megatrain_diagnostics.store.daemon_state import DaemonState
from megatrain_diagnostics.store.hang_evidence import kept_rounds
from megatrain_diagnostics.store.rank_progress import rank_progress
from megatrain_diagnostics.store.rounds_and_hosts import steps_ahead

_FRESH_S = 1.0


def router(parts: DashboardParts) -> APIRouter:
    """Return the routes of the picture of all ranks, of one rank, and of the ranks that hold up the job in a hang."""
    routes = APIRouter(tags=["ranks"], dependencies=[parts.heavy_query])
    source = parts.source

    @routes.get("/grid", response_class=Response, responses={200: {"content": {ARRAYS_TYPE: {}}}})
    def grid(request: Request, round_number: RoundNumber = None) -> Response:
        """Return state, step, operation, score and host of each rank, and the arrows of a hang."""
        key = ("grid", source.live().versions["ranks"], round_number)
        return parts.responses.answer(request, key, lambda: picture_of(source, round_number), fresh_s=_FRESH_S)

    @routes.get("/ranks/{rank}", response_model=RankDocument)
    def rank(
        request: Request, rank: Annotated[int, Path(ge=0, le=2**31 - 1)], round_number: RoundNumber = None
    ) -> Response:
        """Return the position of a rank, its peers, its stacks and the files kept of it."""
        roster = source.roster(round_number)
        if rank >= roster.layout.world_size:
            raise not_found(f"rank={rank}: round {roster.round} has ranks 0 to {roster.layout.world_size - 1}")
        return parts.responses.answer(
            request,
            ("rank", roster.round, rank),
            lambda: rank_document(rank_inputs(source, roster, rank)),
            fresh_s=_FRESH_S,
        )

    @routes.get("/hang", response_model=HangDocument)
    def hang(request: Request, round_number: RoundNumber = None) -> Response:
        """Return the ranks that hold up the job, or did when a round ended; an empty source: no hang is known."""
        number = _chosen_round(source, round_number)
        key = ("hang", number, source.live().versions["ranks"])
        return parts.responses.answer(request, key, lambda: hang_document(number, hang_of(source, number)))

    return routes


def _chosen_round(source: JobSource, round_number: int | None) -> int:
    """Return the requested round, which may exist only as kept black boxes. Raises: DataError, RefusalError."""
    if round_number is None:
        return source.roster(None).round
    if round_number not in kept_rounds(source.run):
        check_round(source.facts(), round_number)
    return round_number


def picture_of(source: JobSource, round_number: int | None) -> bytes:
    """Return the picture of all ranks. Raises: DataError."""
    roster = source.roster(round_number)
    progress = rank_progress(source.events, roster.round, roster.layout.world_size)
    state = source.daemon_state()
    if state is not None and state.round != roster.round:
        state = None
    return ranks_picture(
        roster,
        progress,
        scores=_scores(state),
        silent=state.silent_ranks if state is not None else (),
        hang=_hang(source, roster.round),
    )


def _scores(state: DaemonState | None) -> NDArray[np.float32] | None:
    found = None if state is None else state.scores()
    return found if found is not None and len(found) else None


def _hang(source: JobSource, round_number: int) -> HangPicture | None:
    try:
        seen = hang_of(source, round_number)
    except DataError as error:  # the ranks can be shown even if the kept evidence of the hang cannot be read
        return HangPicture(reason=str(error))
    if seen is None:
        return None
    return HangPicture(
        suspects=[suspect.rank for suspect in seen.finding.suspects],
        silent=seen.finding.silent,
        waits_for=seen.finding.report.waits_for,
        outliers=seen.stacks.outliers,
        in_flight=seen.finding.in_flight,
        reason=seen.finding.culprit.reason,
        source=seen.source,
    )


def rank_inputs(source: JobSource, roster: Roster, rank: int) -> RankInputs:
    """Return the data of one rank. Raises: DataError."""
    events, of_rank = source.events, Where((roster.round,), ranks=(rank,))
    ahead = steps_ahead(events, Spans, of_rank)
    newest = steps_ahead(events, StepTotals, of_rank)
    spans = joined(Spans, [])
    if ahead is not None:
        spans = events.read(Spans, Where((roster.round,), ahead.last, None, (rank,)))
    rows = events.read(Ranks, of_rank)
    state = source.daemon_state()
    is_judged = state is not None and state.round == roster.round
    scores = state.scores() if state is not None and is_judged else None
    try:
        answer = hang_of(source, roster.round)
    except DataError:
        answer = None
    return RankInputs(
        rank=rank,
        roster=roster,
        spans=spans,
        stacks=events.read(Stacks, of_rank),
        pid=int(rows.pid[-1]) if num_rows(rows) else None,
        step=None if newest is None else newest.last,
        score=float(scores[rank]) if scores is not None and rank < len(scores) else None,
        least_score=None if not is_judged or state is None or state.thresholds is None else state.thresholds.score,
        activity=activities_of(source, roster.round).get(rank),
        black_box=_black_box(source, roster.round, rank),
        findings=state.findings if state is not None and is_judged else (),
        suspects=() if answer is None else answer.finding.suspects,
    )


def _black_box(source: JobSource, round_number: int, rank: int) -> str:
    """Return the kept black box of a rank, relative to the run directory; empty where there is none."""
    directory = kept_rounds(source.run).get(round_number)
    if directory is None:
        return ""
    path = kept_black_box(directory, rank)
    return str(path.relative_to(source.run.root)) if path.is_file() else ""
