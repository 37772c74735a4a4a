"""/grid: all ranks on the tp x pp x dp grid, and who waits for whom."""

from __future__ import annotations

import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.dashboard.answers.answer import ARRAYS_TYPE, cached_answer
from megatrain_diagnostics.dashboard.answers.questions import RoundNumber
from megatrain_diagnostics.dashboard.pages.ranks.grid_view import HangPicture, grid_picture
from megatrain_diagnostics.dashboard.pages.ranks.hang_source import hang_of
from megatrain_diagnostics.dashboard.parts import Parts
from megatrain_diagnostics.store.daemon_state import DaemonState
from megatrain_diagnostics.store.rank_progress import rank_progress

_FRESH_S = 1.0


def router(parts: Parts) -> APIRouter:
    """Return the route of the grid."""
    routes = APIRouter(dependencies=[parts.heavy_question])

    @routes.get("/grid", response_class=Response, responses={200: {"content": {ARRAYS_TYPE: {}}}})
    def grid(request: Request, round_number: RoundNumber = None) -> Response:
        """Return state, step, operation, score and host of each rank, and the arrows of a hang."""

        def make() -> bytes:
            roster = parts.source.roster(round_number)
            progress = rank_progress(parts.source.events, roster.round, roster.layout.world_size)
            state = parts.source.daemon_state()
            if state is not None and state.round != roster.round:
                state = None
            return grid_picture(
                roster,
                progress,
                scores=_scores(state),
                silent=state.silent_ranks if state is not None else (),
                hang=_hang(parts, roster.round),
            )

        key = ("grid", parts.source.live().versions.get("grid", 0), round_number)
        return cached_answer(request, parts.answers.get(key, make, fresh_s=_FRESH_S), ARRAYS_TYPE)

    return routes


def _scores(state: DaemonState | None) -> NDArray[np.float32] | None:
    found = None if state is None else state.scores()
    return found if found is not None and len(found) else None


def _hang(parts: Parts, round_number: int) -> HangPicture | None:
    try:
        seen = hang_of(parts.source, round_number)
    except DataError as error:  # the ranks can be shown, whatever is wrong with what is kept of the hang
        return HangPicture(reason=str(error))
    if seen is None:
        return None
    return HangPicture(
        suspects=[one.rank for one in seen.finding.suspects],
        silent=seen.finding.silent,
        waits_for=seen.finding.report.waits_for,
        outliers=seen.stacks.outliers,
        in_flight=seen.finding.in_flight,
        reason=seen.finding.culprit.reason,
        source=seen.source,
    )
