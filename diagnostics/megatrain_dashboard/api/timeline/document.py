"""Types of the steps for which a timeline can be drawn."""

from __future__ import annotations

from megatrain_dashboard.responses.document import Document


class FullStepDocument(Document):
    """A step whose spans were recorded one by one."""

    step: int
    num_ranks: int
    began_unix_s: float
    duration_s: float


class TimelineStepsDocument(Document):
    """The response of /timeline/steps: the oldest first. Of other steps only totals are known."""

    round: int
    steps: tuple[FullStepDocument, ...]
