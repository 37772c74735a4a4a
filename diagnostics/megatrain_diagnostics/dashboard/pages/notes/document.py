"""Notes of people: what is sent, and what there is."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megatrain.jobs.notes import LEAST_TEXT, MOST_TEXT
from megatrain_diagnostics.dashboard.answers.document import Document

Text = Annotated[str, Field(min_length=LEAST_TEXT, max_length=MOST_TEXT)]
Key = Annotated[str, Field(min_length=8, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]


class NoteRequest(Document):
    """The body of POST /notes. At a step, or at a time; at neither: now."""

    text: Text
    step: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None
    at_unix_s: Annotated[float | None, Field(ge=0, lt=2**33)] = None
    idempotency_key: Key
    """Of one note: sent twice, it is written once."""


class RetractionRequest(Document):
    """The body of POST /notes/{id}/retraction."""

    reason: Text
    idempotency_key: Key


class NoteDocument(Document):
    """A note; it stands at a step or at a time, and the other one is null."""

    note_id: str
    written_unix_s: float
    user: str
    text: str
    step: int | None
    at_unix_s: float | None
    retracted_unix_s: float | None
    retracted_by: str
    retraction: str
    """Why it was retracted."""
    incident_ids: tuple[str, ...]
    """In whose time it stands."""


class NotesDocument(Document):
    """The answer of /notes, the newest first."""

    notes: tuple[NoteDocument, ...]
    can_write: bool
    why_not_write: str
    """Empty where can_write; else a sentence."""
