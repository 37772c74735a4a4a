"""What every view's router is made from: `def router(parts: Parts) -> APIRouter`, one such function a file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi.params import Depends

from megatrain_diagnostics.dashboard.answers.answer import AnswerCache
from megatrain_diagnostics.dashboard.security.heavy import HeavyQuestions, downloads
from megatrain_diagnostics.dashboard.settings import DashboardSettings
from megatrain_diagnostics.dashboard.sources.protocol import JobSource


@dataclass(frozen=True, slots=True)
class Parts:
    """The job, what the dashboard may do, the clock (unix seconds), and what many askers share."""

    source: JobSource
    settings: DashboardSettings
    clock: Callable[[], float] = time.time
    answers: AnswerCache = field(default_factory=AnswerCache)
    heavy: HeavyQuestions = field(default_factory=HeavyQuestions)
    downloads: HeavyQuestions = field(default_factory=downloads)

    @property
    def heavy_question(self) -> Depends:
        """What a route that reads many events names in `dependencies=[...]`: only a few such run at a time."""
        return Depends(self.heavy.slot, scope="function")

    @property
    def download(self) -> Depends:
        """What a route that answers with a Download names besides: its turn lasts until all of it was sent."""
        return Depends(self.downloads.slot, scope="request")
