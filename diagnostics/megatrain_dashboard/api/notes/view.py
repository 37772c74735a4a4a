"""Make the document of /notes: the notes of people, and the incidents during which they lie. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.contracts.records.incident import Incident
from megatrain_dashboard.api.notes.document import NoteDocument, NotesDocument
from megatrain_dashboard.sources.facts import JobFacts
from megatrain_dashboard.sources.window import StepClock, Window
from megatrain_job.jobs.notes import Note

_MAX_SHOWN = 1000


def notes_document(facts: JobFacts, window: Window, now_s: float, why_not: str) -> NotesDocument:
    """Return the newest thousand notes of a part of a run."""
    clock = StepClock(facts.series)
    shown = [one for one in reversed(facts.notes) if window.holds(_at_s(one, clock))]
    documents = tuple(note_document(one, facts.incidents, now_s) for one in shown[:_MAX_SHOWN])
    return NotesDocument(notes=documents, can_write=not why_not, why_not_write=why_not)


def note_document(note: Note, incidents: Sequence[Incident], now_s: float) -> NoteDocument:
    return NoteDocument(
        note_id=note.note_id,
        written_unix_s=note.written_unix_s,
        user=note.user,
        text=note.text,
        step=note.step,
        at_unix_s=note.at_unix_s,
        retracted_unix_s=note.retracted_unix_s,
        retracted_by=note.retracted_by,
        retraction=note.retraction,
        incident_ids=tuple(one.incident_id for one in incidents if note.is_of(one, now_s)),
    )


def _at_s(note: Note, clock: StepClock) -> float | None:
    return note.at_unix_s if note.step is None else clock.end_of(note.step)
