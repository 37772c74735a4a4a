"""Whether the server is up."""

from __future__ import annotations

from megatrain_diagnostics.dashboard.answers.document import Document


class HealthDocument(Document):
    """The answer of /healthz and /readyz: says nothing of the job, since callers are not authenticated."""

    is_ready: bool
