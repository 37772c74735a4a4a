"""Logging in."""

from __future__ import annotations

from typing import Literal

from megatrain_dashboard.responses.document import Document


class SessionDocument(Document):
    """The response of POST /session."""

    role: Literal["viewer", "operator"]
    ends_unix_s: int
    page_secret: str
    """Sent with each request in the header X-Megatrain-Session; the cookie alone is worth nothing."""
