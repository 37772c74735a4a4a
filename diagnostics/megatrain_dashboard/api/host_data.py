"""GET /hosts/{host}/data: how long the ranks of a host waited for data, and what its data loader and its cache did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.black_box.operations import Operation, StepValue
from megatrain.contracts.errors import DataError
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import cached_response, document_bytes
from megatrain_dashboard.responses.document import Document
from megatrain_dashboard.responses.query_parameters import From, To
from megatrain_dashboard.sources.window import Window
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Float64, Int64, StepTotals, Values, select
from megatrain_diagnostics.store.step_cells import newest_stored_steps

_NUM_STEPS = 240
_NUM_POINTS = 60
"""Limit of the entries of a history."""
_OPERATIONS = (Operation.STEP.number, Operation.DATA_WAIT.number, Operation.DATA_READ.number)
_FRESH_S = 1.0


class RankDataDocument(Document):
    """The time that a rank waited for its batches. Histories: the greatest value of a few steps, the oldest first."""

    rank: int
    wait_s: float | None
    """Mean of a step."""
    longest_wait_s: float | None
    longest_wait_step: int | None
    num_not_ready: int | None
    """Steps that the host's data loader did not have ready; null without a loader."""
    wait_history: tuple[float | None, ...]


class DataLoaderDocument(Document):
    """The work of a host's data loader (data.loader="host")."""

    replicas: tuple[int, ...]
    """The data-parallel replicas whose samples it reads."""
    num_bytes: float | None
    """Mean bytes of a step in the ring, for all replicas."""
    read_s: float | None
    """Mean time of its reads in a step."""
    longest_read_s: float | None
    """The most in one step."""
    num_ready: int | None
    """Steps that the ring had for the rank with the fewest, when it requested the last step."""
    least_ready: int | None
    """The fewest in any of the steps."""
    most_ready: int | None
    """The most that the ring can have: data.prefetch; null if the configuration is not known."""
    num_starts: int | None
    """The number of its starts in the round; above 1: it was restarted."""
    ready_history: tuple[float | None, ...]
    """The fewest steps that were ready for any rank, the oldest first."""


class DataCacheDocument(Document):
    """The cache of a host for data in object storage: sums over the processes of the host that read data."""

    hit_bytes: float | None
    """Mean bytes that the reads of a step got from the cache; null if only one step is stored."""
    fetched_bytes: float | None
    """Mean bytes of a step that came from the object storage."""
    evicted_bytes: float | None
    """Mean bytes of a step that were removed from the cache to make room."""
    num_not_stored: int
    """Blocks and files that could not be written to the cache since the data were opened in the round."""


class HostDataDocument(Document):
    """The response of /hosts/{host}/data, for at most 240 steps of the newest round; empty if nothing is stored."""

    host: str
    first_step: int | None
    last_step: int | None
    step_s: float | None
    """Mean duration of these steps, without the wait for data."""
    loader: DataLoaderDocument | None
    """Null: each rank reads its own samples, or nothing of a loader was recorded."""
    cache: DataCacheDocument | None
    """Null: no data of the host's ranks are in object storage."""
    ranks: tuple[RankDataDocument, ...]


def nothing_recorded(host: str) -> HostDataDocument:
    """Return the document of a host whose ranks have reported no step."""
    return HostDataDocument(host=host, first_step=None, last_step=None, step_s=None, loader=None, cache=None, ranks=())


def host_data_document(
    host: str, roster: Roster, totals: StepTotals, values: Values, steps: Int64, prefetch: int | None
) -> HostDataDocument:
    """Return the document of a host.

    totals, values: rows of the host's ranks in `steps`, which ascend. prefetch: data.prefetch, if it is known.
    """
    ranks = np.array(roster.ranks_on(host), dtype=np.int64)
    if not len(ranks) or not len(steps):
        return nothing_recorded(host)

    def seconds(operation: Operation) -> Float64:
        rows = select(totals, totals.operation == operation.number)
        return _cells(ranks, steps, rows, rows.sum_ns / 1e9)

    wait_s = seconds(Operation.DATA_WAIT)
    of_kind = select(values, values.kind == StepValue.STEPS_READY)
    ready = _cells(ranks, steps, of_kind, of_kind.value)
    has_loader = bool(np.isfinite(ready).any())
    return HostDataDocument(
        host=host,
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        step_s=_mean(seconds(Operation.STEP)),
        loader=_loader(roster, totals, values, steps, ready, ranks, prefetch) if has_loader else None,
        cache=_cache(ranks, steps, values),
        ranks=tuple(
            _rank(int(rank), wait_s[place], ready[place] if has_loader else None, steps)
            for place, rank in enumerate(ranks)
        ),
    )


def _rank(rank: int, wait_s: Float64, ready: Float64 | None, steps: Int64) -> RankDataDocument:
    longest = int(np.nanargmax(wait_s)) if np.isfinite(wait_s).any() else None
    return RankDataDocument(
        rank=rank,
        wait_s=_mean(wait_s),
        longest_wait_s=None if longest is None else float(wait_s[longest]),
        longest_wait_step=None if longest is None else int(steps[longest]),
        num_not_ready=None if ready is None else int((ready == 0).sum()),
        wait_history=_history(wait_s, np.max),
    )


def _loader(
    roster: Roster,
    totals: StepTotals,
    values: Values,
    steps: Int64,
    ready: Float64,
    ranks: Int64,
    prefetch: int | None,
) -> DataLoaderDocument:
    reads = select(totals, totals.operation == Operation.DATA_READ.number)
    read_s = _cells(ranks, steps, reads, reads.sum_ns / 1e9)
    num_bytes = _cells(ranks, steps, reads, reads.num_bytes.astype(np.float64))
    starts = values.value[values.kind == StepValue.LOADER_STARTS]
    # a step in which the loader has read nothing counts as 0 seconds
    read_by_step = np.nansum(read_s, axis=0)
    fewest = _over_ranks(ready)
    known = fewest[np.isfinite(fewest)]
    return DataLoaderDocument(
        replicas=tuple(sorted({roster.layout.sample_share(rank)[0] for rank in set(reads.rank.tolist())})),
        num_bytes=float(np.nansum(num_bytes) / len(steps)) if len(reads.rank) else None,
        read_s=float(read_by_step.mean()) if len(reads.rank) else None,
        longest_read_s=float(read_by_step.max()) if len(reads.rank) else None,
        num_ready=int(known[-1]) if len(known) else None,
        least_ready=int(known.min()) if len(known) else None,
        most_ready=prefetch,
        num_starts=int(starts.max()) if len(starts) else None,
        ready_history=_history(fewest, np.min),
    )


def _cache(ranks: Int64, steps: Int64, values: Values) -> DataCacheDocument | None:
    def sums(kind: StepValue) -> Float64:
        of_kind = select(values, values.kind == kind)
        found = _cells(ranks, steps, of_kind, of_kind.value)
        return found[np.isfinite(found).any(axis=1)]

    def mean_growth(kind: StepValue) -> float | None:
        found = sums(kind)
        return float((np.nanmax(found, axis=1) - np.nanmin(found, axis=1)).sum() / num_steps) if num_steps else None

    num_steps, not_stored = int(steps[-1] - steps[0]), sums(StepValue.CACHE_NOT_STORED)
    if not len(not_stored):
        return None
    return DataCacheDocument(
        hit_bytes=mean_growth(StepValue.CACHE_HIT_BYTES),
        fetched_bytes=mean_growth(StepValue.CACHE_FETCHED_BYTES),
        evicted_bytes=mean_growth(StepValue.CACHE_EVICTED_BYTES),
        num_not_stored=int(np.nanmax(not_stored, axis=1).sum()),
    )


def _cells(ranks: Int64, steps: Int64, rows: StepTotals | Values, found: Float64) -> Float64:
    """Return a value of each row as a matrix. Shapes: found [rows]; result [ranks, steps], NaN: no row."""
    cells = np.full((len(ranks), len(steps)), np.nan)
    is_inside = np.isin(rows.rank, ranks) & np.isin(rows.step, steps)
    place = np.searchsorted(ranks, rows.rank[is_inside]), np.searchsorted(steps, rows.step[is_inside])
    cells[place] = found[is_inside]
    return cells


def _over_ranks(cells: Float64) -> Float64:
    """Return the least value of each step; NaN where no rank has one. Shape: [steps]."""
    least = np.where(np.isfinite(cells), cells, np.inf).min(axis=0)
    return np.where(np.isfinite(least), least, np.nan)


def _mean(cells: Float64) -> float | None:
    known = cells[np.isfinite(cells)]
    return float(known.mean()) if len(known) else None


def _history(of_steps: Float64, reduce: Callable[[Float64], float]) -> tuple[float | None, ...]:
    """Return the reduced values of each of at most _NUM_POINTS stretches of steps; None where there is none."""
    parts = np.array_split(of_steps, min(_NUM_POINTS, len(of_steps)))
    known = (part[np.isfinite(part)] for part in parts)
    return tuple(float(reduce(part)) if len(part) else None for part in known)


def router(parts: DashboardParts) -> APIRouter:
    """Return the route of a host's data: the waits of its ranks, and its data loader."""
    routes = APIRouter(tags=["hosts"], dependencies=[parts.heavy_query])
    source = parts.source

    def made(host: str, window: Window) -> HostDataDocument:
        roster = source.roster(None)
        steps = newest_stored_steps(source.events, roster.round, _NUM_STEPS, window.first_step, window.last_step)
        first, last = (int(steps[0]), int(steps[-1])) if len(steps) else (0, -1)
        where = Where((roster.round,), first, last, roster.ranks_on(host), _OPERATIONS)
        totals, values = source.events.read(StepTotals, where), source.events.read(Values, where)
        config = source.facts().config
        prefetch = None if config is None else config.data.prefetch
        return host_data_document(host, roster, totals, values, steps, prefetch)

    @routes.get("/hosts/{host}/data", response_model=HostDataDocument)
    def data(request: Request, host: Annotated[str, Path(max_length=256)], begin: From = "", end: To = "") -> Response:
        """Return how long the ranks of a host waited for data in the newest steps, and what its data loader did.

        With `from` and `to`: in the last steps of that part of the newest round.
        """
        window = parts.window(begin, end)

        def make() -> bytes:
            try:
                return document_bytes(made(host, window))
            except DataError:  # no rank has reported anything
                return document_bytes(nothing_recorded(host))

        return cached_response(request, parts.responses.get(("data", host, window), make, fresh_s=_FRESH_S))

    return routes
