"""/heat, /heat.csv, /heat/cell, /heat/outliers: ranks or hosts x steps of one operation, or of device readings."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.contracts.black_box.operations import Operation
from megatrain_dashboard.api.heat.cells import HeatCellReader, HeatQuery
from megatrain_dashboard.api.heat.document import HeatCellDocument, HeatOutliersDocument
from megatrain_dashboard.api.heat.order import BY_RANK, ORDERS, By
from megatrain_dashboard.api.heat.subject import DEVICE_SUBJECTS, Measure, Subject, subject_of
from megatrain_dashboard.api.heat.view import Ends, HeatCells, heat_cell, heat_csv, heat_outliers, heat_picture
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import ARRAYS_TYPE, document_response
from megatrain_dashboard.responses.errors import bad_query
from megatrain_dashboard.responses.heavy import Download
from megatrain_dashboard.responses.query_parameters import LARGEST_NUMBER, From, RoundNumber, Step, To, check_steps
from megatrain_dashboard.sources.window import Window
from megatrain_diagnostics.analysis.findings import Thresholds, thresholds_of
from megatrain_diagnostics.analysis.heat_scale import Scale
from megatrain_diagnostics.events.roster import Roster

_MAX_CELLS = 4_000_000
_MAX_COLUMN_STEPS = 100_000
_FRESH_S = 1.0

Sort = Annotated[str, Query(pattern=f"^({'|'.join(ORDERS)})$")]
MaxCells = Annotated[int, Query(ge=1000, le=_MAX_CELLS)]


class CellChoice:
    """Selects cells: the parameters that all four routes share."""

    def __init__(
        self,
        round_number: RoundNumber = None,
        operation: str = Operation.FORWARD_COMPUTE.value,
        measure: Measure = Measure.SUM,
        first: Step = None,
        last: Step = None,
        begin: From = "",
        end: To = "",
        max_cells: MaxCells = 1_300_000,
    ) -> None:
        """`first` and `last` take precedence over `from` and `to`."""
        check_steps(first, last)
        self.round, self.first, self.last = round_number, first, last
        self.begin, self.end = begin, end
        self.max_cells = max_cells
        self.subject = _subject(operation, measure)


Choice = Annotated[CellChoice, Depends()]


class _HeatQueries:
    """Data that all routes of the heat map read from the source."""

    def __init__(self, parts: DashboardParts) -> None:
        self._parts = parts
        self._reader = HeatCellReader(parts.source.events)

    def version(self) -> int:
        """Return a number that grows when new data arrives."""
        return self._parts.source.live().versions["heat"]

    def thresholds(self) -> Thresholds:
        """Return the thresholds of a straggler, from the run's configuration."""
        config = self._parts.source.facts().config
        return thresholds_of(DiagnosticsConfig() if config is None else config.diagnostics)

    def window_of(self, choice: CellChoice) -> Window:
        """Return the part of the run that the request names."""
        return self._parts.window(choice.begin, choice.end, choice.first, choice.last)

    def read(self, choice: CellChoice) -> HeatCells:
        """Return the cells of a choice."""
        return self._reader.read(self._parts.source.roster(choice.round), self._query(choice))

    def read_around(self, roster: Roster, choice: CellChoice, first: int, last: int) -> HeatCells:
        """Return the cells of a choice from step `first` to `last`."""
        return self._reader.read_around(roster, self._query(choice), first, last)

    def _query(self, choice: CellChoice) -> HeatQuery:
        window = self.window_of(choice)
        first, last = choice.first, choice.last
        return HeatQuery(
            choice.subject, first, last, choice.max_cells, self.version(), window.first_step, window.last_step
        )


def router(parts: DashboardParts) -> APIRouter:
    """Return the routes of the heat map: the picture, the CSV, one cell, and the ranks farthest above their peers."""
    routes = APIRouter(dependencies=[parts.heavy_query])
    queries = _HeatQueries(parts)

    @routes.get("/heat", response_class=Response, responses={200: {"content": {ARRAYS_TYPE: {}}}})
    def heat(
        request: Request,
        choice: Choice,
        scale: Scale = Scale.RELATIVE,
        by: By = By.RANK,
        sort: Sort = BY_RANK,
        low: float | None = None,
        high: float | None = None,
    ) -> Response:
        """Return the heat map. `low` and `high` fix the color scale, to continue a picture with new steps."""
        ends = _ends(low, high)
        key = ("heat", queries.version(), *_values(choice), queries.window_of(choice), scale, by, sort, ends)

        def make() -> bytes:
            return heat_picture(queries.read(choice), scale, by, sort, choice.max_cells, ends)

        return parts.responses.answer(request, key, make, fresh_s=_FRESH_S)

    @routes.get(
        "/heat.csv",
        response_class=Response,
        responses={200: {"content": {"text/csv": {}}}},
        dependencies=[parts.download],
    )
    def heat_table(choice: Choice, scale: Scale = Scale.RELATIVE, by: By = By.RANK, sort: Sort = BY_RANK) -> Download:
        """Return the heat map as CSV: one line per row, one column per step; steps never share a column."""
        cells = queries.read(choice)
        name = f"heat-{cells.roster.round}-{choice.subject.name}-{scale.value}.csv"
        return Download(heat_csv(cells, scale, by, sort), "text/csv; charset=utf-8", name)

    @routes.get("/heat/cell", response_model=HeatCellDocument)
    def cell(
        choice: Choice,
        rank: Annotated[int, Query(ge=0)],
        step: Annotated[int, Query(ge=0, le=LARGEST_NUMBER)],
        scale: Scale = Scale.RELATIVE,
        by: By = By.RANK,
        num_steps: Annotated[int, Query(ge=1, le=_MAX_COLUMN_STEPS)] = 1,
    ) -> Response:
        """Return the exact value of one cell of the heat map.

        A cell may stand for several steps (`num_steps` of them, from `step` on) and, with `by=host`, for all ranks of
        the host of `rank`. Then the value is from the step and rank with the greatest value on `scale`, as in the
        picture.
        """
        roster = parts.source.roster(choice.round)
        if rank >= roster.layout.world_size:
            raise bad_query("rank", rank, f"there are ranks 0 to {roster.layout.world_size - 1}")
        last = min(step + num_steps - 1, LARGEST_NUMBER)
        cells = queries.read_around(roster, choice, step, last)
        return document_response(heat_cell(cells, scale, by, rank, step, num_steps))

    @routes.get("/heat/outliers", response_model=HeatOutliersDocument)
    def outliers(request: Request, choice: Choice) -> Response:
        """Return the ranks farthest above their peers, as a text alternative to the picture."""
        key = ("heat/outliers", queries.version(), *_values(choice), queries.window_of(choice))
        return parts.responses.answer(
            request, key, lambda: heat_outliers(queries.read(choice), queries.thresholds()), fresh_s=_FRESH_S
        )

    return routes


def _values(choice: CellChoice) -> tuple[object, ...]:
    return (choice.round, choice.subject, choice.first, choice.last, choice.max_cells)


def _ends(low: float | None, high: float | None) -> Ends | None:
    """Return the requested ends of the color scale. Raises: RefusalError."""
    if low is None and high is None:
        return None
    if low is None or high is None:
        raise bad_query("low", low, f"low and high={high} go together: give both or none")
    if not -1e15 < low < high < 1e15:
        raise bad_query("high", high, f"it must be a number above low={low}")
    return Ends(low, high)


def _subject(name: str, measure: Measure) -> Subject:
    found = subject_of(name, measure)
    if found is None:
        there = ", ".join([*(operation.value for operation in Operation), *DEVICE_SUBJECTS])
        raise bad_query("operation", name, f"there are {there}")
    return found
