"""GET and POST /notes, POST /notes/{id}/retraction: notes that people write on a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.errors import NotFoundError, UsageError
from megatrain_dashboard.api.notes.document import (
    NoteDocument,
    NoteRequest,
    NotesDocument,
    RetractionRequest,
)
from megatrain_dashboard.api.notes.view import note_document, notes_document
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import document_response
from megatrain_dashboard.responses.errors import RefusalError, conflict, not_found, too_many, unavailable
from megatrain_dashboard.responses.query_parameters import From, To
from megatrain_dashboard.security.roles import Caller, Role, caller_of
from megatrain_job.jobs.notes import Author, Note, NoteRefusedError, NoteWriter

Id = Annotated[str, Path(max_length=64)]


def router(parts: DashboardParts, writer: NoteWriter | None) -> APIRouter:
    """Return the routes that list, add and retract notes of a run. `writer` None: nothing can be written."""
    routes = APIRouter(tags=["notes"])

    def why_not(caller: Caller) -> str:
        if parts.source.is_recorded or writer is None:
            return "this is the history of a run, which this page does not change; megatrain annotate adds notes to it"
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
        """Return the newest thousand notes of a part of the run, including retracted ones."""
        window = parts.window(begin, end)
        caller = caller_of(request)
        return document_response(notes_document(parts.source.facts(), window, parts.clock(), why_not(caller)))

    @routes.post("/notes", response_model=NoteDocument)
    def add(request: Request, body: NoteRequest) -> Response:
        """Write a note, which the audit records. Sent twice under one key, it is written once."""
        key = body.idempotency_key
        return written(
            request,
            lambda own, author: own.add(body.text, author, step=body.step, at_unix_s=body.at_unix_s, key=key),
        )

    @routes.post("/notes/{note_id}/retraction", response_model=NoteDocument)
    def retract(request: Request, note_id: Id, body: RetractionRequest) -> Response:
        """Retract a note. Nothing is removed: note and retraction stay in the audit."""
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
