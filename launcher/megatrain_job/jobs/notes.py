"""Notes that people put on a run, at a step or at a time: "learning rate lowered", "switch 4 was replaced".

A note is an entry of the audit of actions (megatrain.run_files.action_log), so one write records both the note and its
author. Entries never change: a separate entry retracts a wrong note, and both stay in the audit. The limits, and
whether a note can be retracted, are checked under the file's lock: if two people retract a note at once, one gets an
error.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from megatrain.contracts.errors import MegatrainError, NotFoundError, UsageError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.incident import Incident, IncidentState
from megatrain.formatting import count_text, is_control, is_visible, printable, seconds_text, time_text
from megatrain.run_files.action_log import ACTIONS_NAME, RESULT, ActionEntry, ActionLog, ActionTrail, read_actions
from megatrain.run_files.run_directory import RunDirectory

NOTE, RETRACTION = "note", "retract-note"
LEAST_TEXT, MOST_TEXT = 3, 500
MAX_AN_HOUR = 60
"""Notes and retractions together: more than one a minute comes from a script, and hides notes that people wrote."""
MAX_NOTES = 5000
"""Notes of a run, including retracted ones. The audit (64 MiB) has space for many more, but a chart does not."""
_WINDOW_S = 3600.0
_AROUND_S = 300.0
"""A note at most this long before or after an incident belongs to it."""
_LARGEST_STEP = 2**31 - 1
_LATEST_S = 2.0**33
_PLACE = re.compile(r"(?:step ([0-9]{1,10}))|(?:time ([0-9]{1,11}\.[0-9]{3}))", re.ASCII)


@dataclass(frozen=True, slots=True)
class Author:
    """The author of a note. address: where the request came from; empty for the command line."""

    user: str
    role: str
    address: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """A note, possibly retracted. It has either a step or a time; the other one is None."""

    note_id: str
    written_unix_s: float
    user: str
    text: str
    step: int | None = None
    at_unix_s: float | None = None
    retracted_unix_s: float | None = None
    retracted_by: str = ""
    retraction: str = ""
    """The reason why the note was retracted."""

    @property
    def is_retracted(self) -> bool:
        return self.retracted_unix_s is not None

    def is_of(self, incident: Incident, now_s: float) -> bool:
        """Return whether the note belongs to an incident.

        A step belongs to it from the step at which the job resumed to the last step before the incident; a time belongs
        to it from five minutes before its beginning to five minutes after its end.
        """
        moments = incident.moments
        ended_s = now_s if incident.state is IncidentState.OPEN else moments.first_step or moments.detected
        if self.at_unix_s is not None:
            return moments.began - _AROUND_S <= self.at_unix_s <= ended_s + _AROUND_S
        if self.step is None or incident.last_step is None:
            return False
        first = incident.last_step if incident.resumed_step is None else incident.resumed_step
        return first <= self.step <= incident.last_step


class NoteRefusedError(MegatrainError):
    """The run does not accept the note. wait_s: after how many seconds it will; None: never."""

    exit_code = ExitCode.REFUSED

    def __init__(self, text: str, wait_s: float | None = None) -> None:
        self.wait_s = wait_s
        super().__init__(text)


class _AlreadyError(Exception):
    def __init__(self, entry: ActionEntry) -> None:
        self.entry = entry


class NoteWriter:
    """Adds and retracts notes of a run. Safe to use from several threads and processes at once."""

    def __init__(self, log: ActionLog, *, clock: Callable[[], float] = time.time) -> None:
        self._log, self._clock = log, clock

    def add(
        self, text: str, author: Author, *, step: int | None = None, at_unix_s: float | None = None, key: str = ""
    ) -> Note:
        """Write a note durably at a step or at a time (default: now), and return it.

        key: idempotency key; a second call with the same key writes nothing.
        Raises: UsageError for an invalid text, step or time; NoteRefusedError beyond a limit, or for the key of another
        request; OSError.
        """
        at_unix_s = self._clock() if step is None and at_unix_s is None else at_unix_s
        entry = self._entry(NOTE, _place_text(step, at_unix_s), checked_text(text, "a note"), author, key)
        return _note(self._append(entry, lambda past: _check_num_notes(past, entry.at_unix_s)))

    def retract(self, note_id: str, reason: str, author: Author, *, key: str = "") -> Note:
        """Retract a note; it stays in the audit. Return it.

        Raises: NotFoundError; NoteRefusedError if it is retracted already, beyond the limit of an hour, or for the key
        of another request; UsageError; OSError.
        """
        entry = self._entry(RETRACTION, note_id, checked_text(reason, "the reason"), author, key)

        def check(past: ActionTrail) -> None:
            _check_there(past, note_id)
            _check_rate(past, entry.at_unix_s)

        self._append(entry, check)
        return next(note for note in notes_of(self._log.trail().entries) if note.note_id == note_id)

    def _append(self, entry: ActionEntry, check: Callable[[ActionTrail], None]) -> ActionEntry:
        def checked(past: ActionTrail) -> None:
            known = next((former for former in past.entries if former.idempotency_key == entry.idempotency_key), None)
            if known is not None:
                raise _AlreadyError(known)
            check(past)

        try:
            return self._log.append(entry, checked)
        except _AlreadyError as already:
            known = already.entry
            is_same = (known.kind, known.reason, known.user) == (entry.kind, entry.reason, entry.user)
            # the time of a note may be that of the call, which differs when the same request is sent again
            if not is_same or (entry.kind == RETRACTION and known.target != entry.target):
                raise NoteRefusedError("this idempotency_key was used for another request; use a new one") from None
            return known

    def _entry(self, kind: str, target: str, reason: str, author: Author, key: str) -> ActionEntry:
        now_s = self._clock()
        return ActionEntry(
            at_unix_s=now_s,
            stage=RESULT,  # a note is complete as soon as it is written
            action_id=f"{int(now_s * 1000):013d}-{secrets.token_hex(4)}",
            idempotency_key=key or secrets.token_hex(16),
            user=author.user,
            role=author.role,
            address=author.address,
            kind=kind,
            target=target,
            reason=reason,
            is_accepted=True,
            is_done=True,
            text="written" if kind == NOTE else "retracted",
        )


def read_notes(run: RunDirectory) -> tuple[Note, ...]:
    """Return the notes of a run in the order in which they were written. Raises: OSError."""
    return notes_of(read_actions(run.diagnosis / ACTIONS_NAME).entries)


def log_path(run: Path) -> Path:
    """Return the path of the file that has the notes of a run."""
    return RunDirectory(run).diagnosis / ACTIONS_NAME


def notes_of(entries: Iterable[ActionEntry]) -> tuple[Note, ...]:
    """Return the notes in an audit, without invalid entries: any program may have written the file. Pure function."""
    found: dict[str, Note] = {}
    for entry in entries:
        if entry.kind == NOTE and entry.stage == RESULT and _PLACE.fullmatch(entry.target) and _is_text(entry.reason):
            if len(found) < MAX_NOTES:
                found.setdefault(entry.action_id, _note(entry))
        elif entry.kind == RETRACTION and entry.target in found and not found[entry.target].is_retracted:
            found[entry.target] = replace(
                found[entry.target],
                retracted_unix_s=entry.at_unix_s,
                retracted_by=printable(entry.user),
                retraction=printable(entry.reason),
            )
    return tuple(found.values())


def checked_text(text: str, what: str) -> str:
    """Return a text without the blanks around it. Raises: UsageError if it is not valid for a note."""
    text = text.strip()
    if any(is_control(character) for character in text):
        raise UsageError(f"{what} is one line of text without control characters")
    if not _is_text(text):
        raise UsageError(f"{what} has {LEAST_TEXT} to {MOST_TEXT} characters; this one has {len(text)}")
    return text


def moment(text: str) -> float:
    """Return the unix seconds of an ISO 8601 time with its zone. Raises: UsageError."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise UsageError(f"{text!r} is not a time; write one with its zone, such as 2026-11-23T09:30:00Z")
    return found.timestamp()


def place_text(note: Note) -> str:
    """Return the step or the time of a note: "step 1,200", or the time in UTC."""
    return time_text(note.at_unix_s or 0.0) if note.step is None else f"step {note.step:,}"


def _place_text(step: int | None, at_unix_s: float | None) -> str:
    if step is not None and at_unix_s is not None:
        raise UsageError("a note belongs to a step or to a time: give one of them")
    if step is not None:
        if not 0 <= step <= _LARGEST_STEP:
            raise UsageError(f"step {step} does not exist; steps go from 0 to {_LARGEST_STEP}")
        return f"step {step}"
    assert at_unix_s is not None
    if not 0.0 <= at_unix_s < _LATEST_S:
        raise UsageError(f"{at_unix_s} unix seconds is not a time of a run")
    return f"time {at_unix_s:.3f}"


def _is_text(text: str) -> bool:
    return sum(map(is_visible, text)) >= LEAST_TEXT and len(text) <= MOST_TEXT


def _note(entry: ActionEntry) -> Note:
    match = _PLACE.fullmatch(entry.target)
    assert match is not None
    return Note(
        note_id=entry.action_id,
        written_unix_s=entry.at_unix_s,
        user=printable(entry.user),
        text=printable(entry.reason),
        step=None if match[1] is None else int(match[1]),
        at_unix_s=None if match[2] is None else float(match[2]),
    )


def _check_num_notes(past: ActionTrail, now_s: float) -> None:
    num = sum(entry.kind == NOTE for entry in past.entries)
    if num >= MAX_NOTES:
        raise NoteRefusedError(f"the run has {num:,} notes, and no more are accepted")
    _check_rate(past, now_s)


def _check_rate(past: ActionTrail, now_s: float) -> None:
    times = sorted(
        entry.at_unix_s
        for entry in past.entries
        if entry.kind in (NOTE, RETRACTION) and entry.at_unix_s > now_s - _WINDOW_S
    )
    if len(times) >= MAX_AN_HOUR:
        wait_s = times[len(times) - MAX_AN_HOUR] + _WINDOW_S - now_s
        notes = count_text(len(times), "note or retraction", "notes and retractions")
        text = f"{notes} within the last hour, and no more are accepted"
        raise NoteRefusedError(f"{text}; try again in {seconds_text(wait_s)}", wait_s)


def _check_there(past: ActionTrail, note_id: str) -> None:
    known = {note.note_id: note for note in notes_of(past.entries)}
    if note_id not in known:
        raise NotFoundError(f"the run has no note {note_id[:64]!r}")
    note = known[note_id]
    if note.is_retracted:
        raise NoteRefusedError(f"note {note_id} was retracted already, by {note.retracted_by}: {note.retraction}")
