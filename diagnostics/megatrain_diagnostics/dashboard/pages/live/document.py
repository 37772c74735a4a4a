"""The stream of /live: which views have something new. A page asks for those that it shows."""

from __future__ import annotations

from megatrain_diagnostics.dashboard.answers.document import Document


class LiveDocument(Document):
    """An event named "change". `versions`: by view (overview, series, heat, grid, stragglers, incidents, hosts,
    checkpoints, logs, timeline; of many jobs: jobs), a number that grows; `session` is new with every life of the
    server."""

    session: str
    at_unix_s: float
    step: int | None
    versions: dict[str, int]
