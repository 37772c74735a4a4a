"""What all documents have in common, and the one that every refusal is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    """Cannot be changed once made; holds no number that is none: JSON has no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ErrorDocument(Document):
    """The body of every refusal."""

    error: str
    """A word for programs: unauthorized, forbidden, not-found, bad-request, too-large, too-many, unavailable or
    conflict."""
    text: str
    """A sentence for people: what was found, the rule, the way out."""
