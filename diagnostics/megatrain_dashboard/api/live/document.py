"""The event of /live: which topics have something new. A page then requests the responses that it shows."""

from __future__ import annotations

from megatrain_dashboard.responses.document import Document


class LiveDocument(Document):
    """An event named "change". `versions`: by topic (overview, series, heat, ranks, stragglers, incidents, hosts,
    checkpoints, logs, timeline; of many jobs: jobs), a number that grows; `session` is new with every life of the
    server."""

    session: str
    at_unix_s: float
    step: int | None
    versions: dict[str, int]
