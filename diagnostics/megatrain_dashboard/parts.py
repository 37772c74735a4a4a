"""The objects that the routers share. Each subject of the API has a function `router` that takes these parts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi.params import Depends

from megatrain.contracts.errors import UsageError
from megatrain_dashboard.responses.cache import ResponseCache
from megatrain_dashboard.responses.errors import RefusalError, shown
from megatrain_dashboard.responses.heavy import HeavyQueries, downloads
from megatrain_dashboard.settings import DashboardSettings
from megatrain_dashboard.sources.facts import JobFacts
from megatrain_dashboard.sources.protocol import JobSource
from megatrain_dashboard.sources.runs.catalog import JobCatalog
from megatrain_dashboard.sources.window import WHOLE_RUN, Window, bound_of, window_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The settings, the clock (unix seconds), and the caches and limits that all requests share."""

    settings: DashboardSettings
    clock: Callable[[], float] = time.time
    responses: ResponseCache = field(default_factory=ResponseCache)
    heavy: HeavyQueries = field(default_factory=HeavyQueries)
    downloads: HeavyQueries = field(default_factory=downloads)

    @property
    def heavy_query(self) -> Depends:
        """The dependency of routes that read many events (`dependencies=[...]`): few such requests run at a time."""
        return Depends(self.heavy.slot, scope="function")

    @property
    def download(self) -> Depends:
        """A further dependency of routes that answer with a Download: its limit counts a request until the whole
        response is sent.
        """
        return Depends(self.downloads.slot, scope="request")


@dataclass(frozen=True, slots=True)
class DashboardParts(_Parts):
    """What the routers of one job share."""

    source: JobSource

    def window(self, begin: str, end: str, first: int | None = None, last: int | None = None) -> Window:
        """Return the part of the run that `from` and `to` name; the whole run where `first` or `last` names a step.

        Raises: RefusalError.
        """
        if first is not None or last is not None or not (begin or end):
            return WHOLE_RUN
        facts = self.source.facts()
        try:
            bounds = bound_of(begin, is_begin=True), bound_of(end, is_begin=False)
            return window_of(*bounds, facts.series, self._newest_s(facts))
        except UsageError as error:
            raise RefusalError(400, f"from={shown(begin)}, to={shown(end)}: {error}") from error

    def _newest_s(self, facts: JobFacts) -> float:
        """Return the newest moment of a finished run, or the present for a live one, in whole seconds."""
        if not self.source.is_recorded:
            return math.floor(self.clock())  # so that many requests share a response
        ended_s = [incident.moments.first_step or incident.moments.detected for incident in facts.incidents]
        return math.ceil(max([*ended_s, facts.series.newest("at") or 0.0]))


@dataclass(frozen=True, slots=True)
class JobsParts(_Parts):
    """What the routers of the list of jobs share. All jobs share `heavy` and `downloads`."""

    catalog: JobCatalog

    def of_one(self, source: JobSource) -> DashboardParts:
        """Return the parts of one of the jobs."""
        return DashboardParts(
            source, settings=self.settings, clock=self.clock, heavy=self.heavy, downloads=self.downloads
        )
