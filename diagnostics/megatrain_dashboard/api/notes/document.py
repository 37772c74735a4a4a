"""Types of notes: requests to write them, and their responses."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megatrain_dashboard.responses.document import Document
from megatrain_job.jobs.notes import LEAST_TEXT, MOST_TEXT

Text = Annotated[str, Field(min_length=LEAST_TEXT, max_length=MOST_TEXT)]
Key = Annotated[str, Field(min_length=8, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]


class NoteRequest(Document):
    """The body of POST /notes. Give a step or a time; without either, the time is now."""

    text: Text
    step: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None
    at_unix_s: Annotated[float | None, Field(ge=0, lt=2**33)] = None
    idempotency_key: Key
    """Identifies one note: if it is sent twice, it is written once."""


class RetractionRequest(Document):
    """The body of POST /notes/{id}/retraction."""

    reason: Text
    idempotency_key: Key


class NoteDocument(Document):
    """A note; it belongs to a step or to a time, and the other one is null."""

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
    """The incidents during which the note's time lies."""


class NotesDocument(Document):
    """The response of /notes, the newest first."""

    notes: tuple[NoteDocument, ...]
    can_write: bool
    why_not_write: str
    """Empty if `can_write` is true; else a sentence."""
