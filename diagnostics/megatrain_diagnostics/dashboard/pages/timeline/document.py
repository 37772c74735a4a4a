"""Which steps a timeline can be drawn of."""

from __future__ import annotations

from megatrain_diagnostics.dashboard.answers.document import Document


class FullStepDocument(Document):
    """A step of which spans were recorded one by one."""

    step: int
    num_ranks: int
    began_unix_s: float
    duration_s: float


class TimelineStepsDocument(Document):
    """The answer of /timeline/steps: the oldest first. Other steps are known as sums only."""

    round: int
    steps: tuple[FullStepDocument, ...]
