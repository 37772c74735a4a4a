"""Logging in."""

from __future__ import annotations

from typing import Literal

from megatrain_diagnostics.dashboard.answers.document import Document


class SessionDocument(Document):
    """The answer of POST /session."""

    role: Literal["viewer", "operator"]
    ends_unix_s: int
