"""GET /hosts/{host}/data: how long the ranks of a host waited for data, and what its loader and producers did."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.black_box.operations import OF_DATA_LOADER, Operation
from megatrain.contracts.errors import DataError
from megatrain.contracts.log_messages import REPLACED_SAMPLES
from megatrain_dashboard.api.host_data.document import HostDataDocument, nothing_recorded
from megatrain_dashboard.api.host_data.view import ConfiguredData, HostRows, configured_data, host_data_document
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.query_parameters import From, To
from megatrain_dashboard.sources.window import Window
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import StepTotals, Values
from megatrain_diagnostics.store.log_query import LogQuery, search_lines
from megatrain_diagnostics.store.step_cells import newest_stored_steps

_NUM_STEPS = 240
_OPERATIONS = tuple(one.number for one in (Operation.STEP, Operation.DATA_WAIT, *OF_DATA_LOADER))
_MAX_REPLACED = 20
_SEARCH_S = 1.0
_FRESH_S = 1.0


def router(parts: DashboardParts) -> APIRouter:
    """Return the route of a host's data."""
    routes = APIRouter(tags=["hosts"], dependencies=[parts.heavy_query])
    source = parts.source

    def made(host: str, window: Window) -> HostDataDocument:
        roster = source.roster(None)
        steps = newest_stored_steps(source.events, roster.round, _NUM_STEPS, window.first_step, window.last_step)
        first, last = (int(steps[0]), int(steps[-1])) if len(steps) else (0, -1)
        where = Where((roster.round,), first, last, roster.ranks_on(host), _OPERATIONS)
        totals, values = source.events.read(StepTotals, where), source.events.read(Values, where)
        # only the time of these steps is searched: the log of a round may be long
        begin_ns = int(totals.start_ns.min()) if len(totals.start_ns) else None
        search = LogQuery(roster.round, REPLACED_SAMPLES, hosts=(host,), limit=_MAX_REPLACED, first_ns=begin_ns)
        lines = search_lines(source.events, search, budget_s=_SEARCH_S).lines
        config = source.facts().config
        configured = ConfiguredData() if config is None else configured_data(config)
        return host_data_document(host, roster, HostRows(steps, totals, values, lines), configured)

    @routes.get("/hosts/{host}/data", response_model=HostDataDocument)
    def data(request: Request, host: Annotated[str, Path(max_length=256)], begin: From = "", end: To = "") -> Response:
        """Return how long the ranks of a host waited for data in the newest steps, and what its data loader and the
        producers of pictures did.

        With `from` and `to`: in the last steps of that part of the newest round.
        """
        window = parts.window(begin, end)

        def make() -> HostDataDocument:
            try:
                return made(host, window)
            except DataError:  # no rank has reported anything
                return nothing_recorded(host)

        return parts.responses.answer(request, ("data", host, window), make, fresh_s=_FRESH_S)

    return routes
