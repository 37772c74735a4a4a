"""What every view's router is made from: `def router(parts: Parts) -> APIRouter`, one such function a file."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi.params import Depends

from megatrain.contracts.errors import UsageError
from megatrain_diagnostics.dashboard.answers.answer import AnswerCache
from megatrain_diagnostics.dashboard.answers.errors import RefusalError, shown
from megatrain_diagnostics.dashboard.security.heavy import HeavyQuestions, downloads
from megatrain_diagnostics.dashboard.settings import DashboardSettings
from megatrain_diagnostics.dashboard.sources.facts import JobFacts
from megatrain_diagnostics.dashboard.sources.protocol import JobSource
from megatrain_diagnostics.dashboard.sources.runs.catalog import JobCatalog
from megatrain_diagnostics.dashboard.sources.window import Window, bound_of, window_of


@dataclass(frozen=True, slots=True)
class Parts:
    """The job, what the dashboard may do, the clock (unix seconds), and what many askers share."""

    source: JobSource
    settings: DashboardSettings
    clock: Callable[[], float] = time.time
    answers: AnswerCache = field(default_factory=AnswerCache)
    heavy: HeavyQuestions = field(default_factory=HeavyQuestions)
    downloads: HeavyQuestions = field(default_factory=downloads)

    def window(self, begin: str, end: str) -> Window:
        """Return the part of the run that `from` and `to` name. Raises: RefusalError."""
        if not begin and not end:
            return Window()
        facts = self.source.facts()
        try:
            first, last = bound_of(begin, is_begin=True), bound_of(end, is_begin=False)
            return window_of(first, last, facts.series, self._newest_s(facts))
        except UsageError as error:
            raise RefusalError(400, f"from={shown(begin)}, to={shown(end)}: {error}") from error

    def _newest_s(self, facts: JobFacts) -> float:
        """Return the newest moment of a run that is over, in whole seconds; of a live one, now."""
        if not self.source.is_recorded:
            return math.floor(self.clock())  # so that many who ask share an answer
        ended_s = [one.moments.first_step or one.moments.detected for one in facts.incidents]
        return math.ceil(max([*ended_s, facts.series.newest("at") or 0.0]))

    @property
    def heavy_question(self) -> Depends:
        """What a route that reads many events names in `dependencies=[...]`: only a few such run at a time."""
        return Depends(self.heavy.slot, scope="function")

    @property
    def download(self) -> Depends:
        """What a route that answers with a Download names besides: its turn lasts until all of it was sent."""
        return Depends(self.downloads.slot, scope="request")


@dataclass(frozen=True, slots=True)
class JobsParts:
    """The same for the views of many jobs; what bounds heavy questions, their own applications share."""

    catalog: JobCatalog
    settings: DashboardSettings
    clock: Callable[[], float] = time.time
    answers: AnswerCache = field(default_factory=AnswerCache)
    heavy: HeavyQuestions = field(default_factory=HeavyQuestions)
    downloads: HeavyQuestions = field(default_factory=downloads)

    @property
    def heavy_question(self) -> Depends:
        """As of Parts."""
        return Depends(self.heavy.slot, scope="function")

    def of_one(self, source: JobSource) -> Parts:
        """Return the parts of one of the jobs."""
        return Parts(source, self.settings, self.clock, heavy=self.heavy, downloads=self.downloads)
