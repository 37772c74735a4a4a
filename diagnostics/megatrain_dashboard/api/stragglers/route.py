"""GET /stragglers and /whatif."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.contracts.errors import DataError
from megatrain_dashboard.api.stragglers.document import StragglersDocument, WhatIfDocument
from megatrain_dashboard.api.stragglers.view import stragglers_of_daemon, stragglers_of_events
from megatrain_dashboard.api.stragglers.whatif_reader import WhatIfReader
from megatrain_dashboard.api.stragglers.whatif_view import RemedyCost, whatif_document
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.errors import not_found
from megatrain_dashboard.responses.query_parameters import (
    From,
    RoundNumber,
    Step,
    To,
    check_round,
    check_steps,
)
from megatrain_dashboard.sources.facts import completed_step
from megatrain_dashboard.sources.protocol import JobSource
from megatrain_diagnostics.analysis.findings import Finding, thresholds_of
from megatrain_diagnostics.analysis.stored_stragglers import NEWEST_STEPS, stored_stragglers
from megatrain_diagnostics.analysis.straggler_history import StragglerHistory
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.store.daemon_state import DaemonState
from megatrain_job.jobs.assessment import assess
from megatrain_job.jobs.lost_time import measured_restart_cost_s

_FRESH_S = 1.0
_COMPUTED_FRESH_S = 60.0
_MAX_ROWS = 4_000_000
"""Limit of the sums that are read for one response: about ten for each rank and step."""
_ROWS_A_STEP = 10


def router(parts: DashboardParts) -> APIRouter:
    """Return the routes that answer with the slow ranks of a round, and with the time that they cost."""
    routes = APIRouter(tags=["stragglers"], dependencies=[parts.heavy_query])
    source = parts.source
    reader = WhatIfReader(source.events)

    @routes.get("/stragglers", response_model=StragglersDocument)
    def stragglers(request: Request, round_number: RoundNumber = None) -> Response:
        """Return the stragglers: as the daemon judges the running job, or else computed from the events."""
        check_round(source.facts(), round_number)
        state = daemon_state_of_round(source, round_number)
        if state is not None:
            key = ("stragglers", "daemon", state.session, state.written_unix_s)
            return parts.responses.answer(request, key, lambda: stragglers_of_daemon(state))
        roster = source.roster(round_number)
        fresh_s = float("inf") if source.is_recorded else _COMPUTED_FRESH_S
        version = source.live().versions["stragglers"] if source.is_recorded else 0
        name = ("stragglers", "events", roster.round, version)
        return parts.responses.answer(
            request, name, lambda: stragglers_of_events(roster.round, _judged(source, roster)), fresh_s=fresh_s
        )

    @routes.get("/whatif", response_model=WhatIfDocument)
    def whatif(
        request: Request,
        round_number: RoundNumber = None,
        first: Step = None,
        last: Step = None,
        begin: From = "",
        end: To = "",
    ) -> Response:
        """Return what stragglers cost, from a replay of the newest fully recorded steps of a part of the run.

        `first` and `last` take precedence over `from` and `to`.
        """
        if first is None and last is None:
            window = parts.window(begin, end)
            if window.has_no_step:
                raise not_found("no step ended in this range")
            first, last = window.first_step, window.last_step
        check_steps(first, last)
        check_round(source.facts(), round_number)
        roster = source.roster(round_number)

        def make() -> WhatIfDocument:
            replayed = reader.replayed(roster, first, last, source.job)
            hosts = dict.fromkeys(roster.host_of(rank) for rank in replayed.result.worst_ranks)
            return whatif_document(
                roster.round,
                replayed.result,
                _findings(source, roster),
                [host for host in hosts if host],
                remedy_cost_of(source, parts.clock(), roster.round),
                replayed.notes,
            )

        key = ("whatif", roster.round, first, last, source.live().versions["stragglers"])
        return parts.responses.answer(request, key, make, fresh_s=_COMPUTED_FRESH_S)

    return routes


def daemon_state_of_round(source: JobSource, round_number: int | None) -> DaemonState | None:
    """Return the running daemon's state for a round; None where it does not run or judges another round."""
    state = source.daemon_state()
    if source.is_recorded or state is None or source.facts().is_daemon_alive is False:
        return None
    shown = state.round if round_number is None else round_number
    return state if state.round == shown and state.step is not None else None


def _findings(source: JobSource, roster: Roster) -> Sequence[Finding]:
    """Return the daemon's last findings for a round; else those that hold at the end of the round's events."""
    state = source.daemon_state()
    if state is not None and state.round == roster.round:
        return state.findings
    try:
        found = _judged(source, roster)
    except DataError:
        return ()  # the spans of steps exist, but their sums do not
    return [finding for finding in found.findings if finding.key not in found.ended]


def remedy_cost_of(source: JobSource, now_s: float, round_number: int) -> RemedyCost:
    """Return the cost of a restart, and the number of steps that remain after a round, over which a gain counts."""
    facts, snapshot = source.facts(), source.snapshot()
    measured = measured_restart_cost_s(facts.incidents)
    config = facts.config
    default_s = (DiagnosticsConfig() if config is None else config.diagnostics).restart_cost_s
    step = completed_step(None if snapshot is None else assess(snapshot, now_s), facts)
    if round_number < max((number for number, _, _ in facts.series.reached), default=round_number):
        step = next((last + 1 for number, _, last in facts.series.reached if number == round_number), step)
    remaining = None if config is None or step is None else max(0, config.train.steps - step)
    if measured is not None:
        return RemedyCost(remaining, measured, "measured")
    return RemedyCost(remaining, default_s, f"diagnostics.restart_cost_s={default_s:g}")


def _judged(source: JobSource, roster: Roster) -> StragglerHistory:
    """Return the stragglers of a round's newest steps. Raises: DataError where no step was recorded."""
    config = source.facts().config
    thresholds = thresholds_of(DiagnosticsConfig() if config is None else config.diagnostics)
    fitting = _MAX_ROWS // (_ROWS_A_STEP * max(1, roster.layout.world_size))
    most = min(NEWEST_STEPS, max(4 * thresholds.num_steps, fitting))
    return stored_stragglers(source.events, roster, thresholds, most=most)
