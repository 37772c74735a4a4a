"""/grid: the picture of all ranks in the view Ranks, and which rank waits for which."""

from __future__ import annotations

import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.errors import DataError
from megatrain_dashboard.api.ranks.hang_source import hang_of
from megatrain_dashboard.api.ranks.picture_view import HangPicture, ranks_picture
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import ARRAYS_TYPE, cached_response
from megatrain_dashboard.responses.query_parameters import RoundNumber
from megatrain_diagnostics.store.daemon_state import DaemonState
from megatrain_diagnostics.store.rank_progress import rank_progress

_FRESH_S = 1.0


def router(parts: DashboardParts) -> APIRouter:
    """Return the route of the picture."""
    routes = APIRouter(dependencies=[parts.heavy_query])

    # the address of the view Ranks is "grid" too: addresses never change
    @routes.get("/grid", response_class=Response, responses={200: {"content": {ARRAYS_TYPE: {}}}})
    def grid(request: Request, round_number: RoundNumber = None) -> Response:
        """Return state, step, operation, score and host of each rank, and the arrows of a hang."""

        def make() -> bytes:
            roster = parts.source.roster(round_number)
            progress = rank_progress(parts.source.events, roster.round, roster.layout.world_size)
            state = parts.source.daemon_state()
            if state is not None and state.round != roster.round:
                state = None
            return ranks_picture(
                roster,
                progress,
                scores=_scores(state),
                silent=state.silent_ranks if state is not None else (),
                hang=_hang(parts, roster.round),
            )

        key = ("grid", parts.source.live().versions.get("grid", 0), round_number)
        return cached_response(request, parts.responses.get(key, make, fresh_s=_FRESH_S), ARRAYS_TYPE)

    return routes


def _scores(state: DaemonState | None) -> NDArray[np.float32] | None:
    found = None if state is None else state.scores()
    return found if found is not None and len(found) else None


def _hang(parts: DashboardParts, round_number: int) -> HangPicture | None:
    try:
        seen = hang_of(parts.source, round_number)
    except DataError as error:  # the ranks can be shown even if the kept evidence of the hang cannot be read
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
