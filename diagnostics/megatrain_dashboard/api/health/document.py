"""Whether the server is up."""

from __future__ import annotations

from megatrain_dashboard.responses.document import Document


class HealthDocument(Document):
    """The response of /healthz and /readyz. It contains nothing about the job: callers are not authenticated."""

    is_ready: bool
