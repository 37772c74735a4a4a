"""GET and POST /notes, POST /notes/{id}/retraction: notes that people write on a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.errors import NotFoundError, UsageError
from megatrain.contracts.records.incident import Incident
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import document_response
from megatrain_dashboard.responses.document import Document
from megatrain_dashboard.responses.errors import RefusalError, conflict, not_found, too_many, unavailable
from megatrain_dashboard.responses.query_parameters import From, To
from megatrain_dashboard.security.roles import Caller, Role, caller_of
from megatrain_dashboard.sources.facts import JobFacts
from megatrain_dashboard.sources.window import StepClock, Window
from megatrain_job.jobs.notes import LEAST_TEXT, MOST_TEXT, Author, Note, NoteRefusedError, NoteWriter

Text = Annotated[str, Field(min_length=LEAST_TEXT, max_length=MOST_TEXT)]
Key = Annotated[str, Field(min_length=8, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
_MAX_SHOWN = 1000
Id = Annotated[str, Path(max_length=64)]


class NoteRequest(Document):
    """The body of POST /notes. Give a step or a time; without either, the time is now."""

    text: Text
    step: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None
    at_unix_s: Annotated[float | None, Field(ge=0, lt=2**33)] = None
    idempotency_key: Key
    """Identifies a note: a note that is sent twice under one key is written once."""


class RetractionRequest(Document):
    """The body of POST /notes/{id}/retraction."""

    reason: Text
    idempotency_key: Key


class NoteDocument(Document):
    """A note. It belongs to a step or to a time; the other field is null."""

    note_id: str
    written_unix_s: float
    user: str
    text: str
    step: int | None
    at_unix_s: float | None
    retracted_unix_s: float | None
    retracted_by: str
    retraction: str
    """The reason why the note was retracted."""
    incident_ids: tuple[str, ...]
    """The incidents that the note belongs to, by its time or its step."""


class NotesDocument(Document):
    """The response of /notes, the newest first."""

    notes: tuple[NoteDocument, ...]
    can_write: bool
    why_not_write: str
    """Empty if `can_write` is true; else a sentence."""


def notes_document(facts: JobFacts, window: Window, now_s: float, why_not: str) -> NotesDocument:
    """Return the newest thousand notes of a part of a run."""
    clock = StepClock(facts.series)
    shown = [note for note in reversed(facts.notes) if window.holds(_at_s(note, clock))]
    documents = tuple(note_document(note, facts.incidents, now_s) for note in shown[:_MAX_SHOWN])
    return NotesDocument(notes=documents, can_write=not why_not, why_not_write=why_not)


def note_document(note: Note, incidents: Sequence[Incident], now_s: float) -> NoteDocument:
    ids = tuple(incident.incident_id for incident in incidents if note.is_of(incident, now_s))
    return NoteDocument.of(note, incident_ids=ids)


def _at_s(note: Note, clock: StepClock) -> float | None:
    return note.at_unix_s if note.step is None else clock.end_of(note.step)


def router(parts: DashboardParts, writer: NoteWriter | None) -> APIRouter:
    """Return the routes that list, add and retract notes of a run. `writer` None: no note can be written."""
    routes = APIRouter(tags=["notes"])

    def why_not(caller: Caller) -> str:
        if parts.source.is_recorded or writer is None:
            return "this page shows the history of a run and does not change it; megatrain annotate adds notes"
        if caller.role is not Role.OPERATOR:
            return "viewers may only read: log in with the token of an operator, or use megatrain annotate"
        return ""

    def written(request: Request, write: Callable[[NoteWriter, Author], Note]) -> Response:
        caller = caller_of(request)
        reason = why_not(caller)
        if reason or writer is None:
            raise RefusalError(403, reason)
        note = _guarded(lambda: write(writer, Author(caller.user, caller.role, caller.address)))
        return document_response(note_document(note, parts.source.facts().incidents, parts.clock()))

    @routes.get("/notes", response_model=NotesDocument)
    def notes(request: Request, begin: From = "", end: To = "") -> Response:
        """Return the notes of the requested part of the run, the newest first and at most a thousand.

        Retracted notes are included. `can_write`: whether the caller may add notes; `why_not_write`: why not.
        """
        window = parts.window(begin, end)
        caller = caller_of(request)
        return document_response(notes_document(parts.source.facts(), window, parts.clock(), why_not(caller)))

    @routes.post("/notes", response_model=NoteDocument)
    def add(request: Request, body: NoteRequest) -> Response:
        """Add a note to the run and to the audit. If a request is repeated with its key, no second note is added."""
        key = body.idempotency_key
        return written(
            request,
            lambda own, author: own.add(body.text, author, step=body.step, at_unix_s=body.at_unix_s, key=key),
        )

    @routes.post("/notes/{note_id}/retraction", response_model=NoteDocument)
    def retract(request: Request, note_id: Id, body: RetractionRequest) -> Response:
        """Mark a note as retracted, with the reason. The note itself stays, also in the audit."""
        key = body.idempotency_key
        return written(request, lambda own, author: own.retract(note_id, body.reason, author, key=key))

    return routes


def _guarded(write: Callable[[], Note]) -> Note:
    """Return the note that `write` returns. Raises: RefusalError."""
    try:
        return write()
    except UsageError as error:
        raise RefusalError(400, str(error)) from error
    except NotFoundError as error:
        raise not_found(str(error)) from error
    except NoteRefusedError as error:
        if error.wait_s is not None:
            raise too_many(str(error), retry_after_s=round(error.wait_s) + 1) from error
        raise conflict(str(error)) from error
    except OSError as error:
        raise unavailable(f"nothing was written: {error.strerror or error}") from error
