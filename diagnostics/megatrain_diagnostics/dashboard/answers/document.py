"""What all documents have in common, the one that every refusal is, and those that several pages hold."""

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


class ThresholdsDocument(Document):
    """From which values on a rank is a straggler; all three must be reached."""

    excess: float
    """Over its peers, as a part of what its stage computes."""
    score: float
    num_steps: int
    """In so many steps."""
