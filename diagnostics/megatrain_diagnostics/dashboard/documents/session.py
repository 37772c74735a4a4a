"""Logging in, and whether the server is up."""

from __future__ import annotations

from typing import Literal

from megatrain_diagnostics.dashboard.documents.document import Document


class SessionDocument(Document):
    """The answer of POST /session."""

    role: Literal["viewer", "operator"]
    ends_unix_s: int


class HealthDocument(Document):
    """The answer of /healthz and /readyz: says nothing of the job, since nobody is asked who he is."""

    is_ready: bool
