"""GET /marks: events of a run as marks on its charts, with step and time, at most as many as a chart can show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from megatrain.checkpoint.survey import FoundCheckpoint
from megatrain.formatting import count_text, printable
from megatrain.run_files.config_changes import ConfigChange
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.document import Document
from megatrain_dashboard.responses.query_parameters import From, To
from megatrain_dashboard.sources.facts import JobFacts
from megatrain_dashboard.sources.window import StepClock, Window
from megatrain_job.jobs.incident_phrases import KIND_TEXTS

MarkKind = Literal["incident", "note", "config", "checkpoint", "round", "bad"]
MAX_MARKS_OF_A_KIND = 200
"""If there are more, neighbors become one mark: a chart has space for about this number."""
_MAX_CHANGES = 200
_NAMED_KEYS = 3
_NAMES = {"bad": "non-finite step", "config": "configuration change", "round": "new round"}
_TOPICS = ("incidents", "checkpoints", "overview")


class MarkDocument(Document):
    """Something that happened, or several events of one kind that are too close to be distinct in a chart."""

    kind: MarkKind
    step: int | None
    """Null: it belongs to no known step."""
    at_unix_s: float | None
    text: str
    """A sentence; for several events their number and kind."""
    ref: str
    """An incident's id, a note's id, a round's number, a checkpoint's step; empty for several."""
    count: int
    last_step: int | None
    """The last step of several events; else as `step`."""
    last_unix_s: float | None


class ChangedKeyDocument(Document):
    key: str
    before: str
    """The value as TOML; empty: the configuration did not have the key."""
    after: str


class ConfigChangeDocument(Document):
    """A round that began with another configuration than the previous round."""

    round: int
    first_step: int
    at_unix_s: float
    keys: tuple[ChangedKeyDocument, ...]


class MarksDocument(Document):
    """The response of /marks, by time. `changes`: changes of the configuration in the same part of the run."""

    marks: tuple[MarkDocument, ...]
    changes: tuple[ConfigChangeDocument, ...]


@dataclass(frozen=True, slots=True)
class _Mark:
    kind: MarkKind
    step: int | None
    at_s: float | None
    text: str
    ref: str


def marks_document(facts: JobFacts, window: Window) -> MarksDocument:
    """Return the marks and the configuration changes of a part of a run."""
    clock = StepClock(facts.series)
    kinds = (_incidents(facts), _notes(facts), _configs(facts), _checkpoints(facts), _rounds(facts), _bad(facts))
    shown = [
        _thinned([placed for placed in (_placed(mark, clock) for mark in kind) if _is_in(placed, window)])
        for kind in kinds
    ]
    marks = sorted((mark for kind in shown for mark in kind), key=lambda mark: (mark.at_unix_s or 0.0, mark.kind))
    changes = [change for change in facts.changes if window.holds(change.at_unix_s)]
    return MarksDocument(marks=tuple(marks), changes=tuple(map(_change, changes[-_MAX_CHANGES:])))


def _incidents(facts: JobFacts) -> Iterator[_Mark]:
    for incident in facts.incidents:
        yield _Mark(
            "incident", incident.last_step, incident.moments.began, KIND_TEXTS[incident.kind], incident.incident_id
        )


def _notes(facts: JobFacts) -> Iterator[_Mark]:
    for note in facts.notes:
        if not note.is_retracted:
            yield _Mark("note", note.step, note.at_unix_s, f"{note.user}: {note.text}", note.note_id)


def _configs(facts: JobFacts) -> Iterator[_Mark]:
    for change in facts.changes:
        yield _Mark("config", change.first_step, change.at_unix_s, config_text(change), str(change.round))


def config_text(change: ConfigChange) -> str:
    """Return "round 3 began with optimizer.lr=0.001 instead of 0.0003"."""
    named = [
        f"{key.key}={key.after or 'nothing'} instead of {key.before or 'nothing'}" for key in change.keys[:_NAMED_KEYS]
    ]
    rest = len(change.keys) - len(named)
    more = f", and {count_text(rest, 'more key')} changed" if rest else ""
    return printable(f"round {change.round} began with {', '.join(named)}{more}")


def _checkpoints(facts: JobFacts) -> Iterator[_Mark]:
    survey = facts.checkpoints.survey
    for checkpoint in () if survey is None else survey.checkpoints:
        yield _Mark(
            "checkpoint", checkpoint.step, checkpoint.written_unix_s, _checkpoint_text(checkpoint), str(checkpoint.step)
        )


def _checkpoint_text(found: FoundCheckpoint) -> str:
    return printable(f"checkpoint of step {found.step:,}, {found.state}, branch {found.branch}")


def _rounds(facts: JobFacts) -> Iterator[_Mark]:
    """Yield a mark for each round after the first."""
    reached = {number: first for number, first, _ in facts.series.reached}
    for round_ in facts.rounds[1:]:
        if round_.is_confirmed:
            yield _Mark(
                "round",
                reached.get(round_.number),
                round_.began_unix_s,
                f"round {round_.number} began",
                str(round_.number),
            )


def _bad(facts: JobFacts) -> Iterator[_Mark]:
    for step in facts.series.bad_steps:
        yield _Mark("bad", step, None, f"loss or gradient norm of step {step:,} was not finite", str(step))


def _placed(mark: _Mark, clock: StepClock) -> MarkDocument:
    """Return a mark with step and time; where only one of them is known, the other is derived from it."""
    step, at_s = mark.step, mark.at_s
    if at_s is None and step is not None:
        at_s = clock.end_of(step)
    if step is None:
        step = clock.last_ended_by(at_s)
    return MarkDocument(
        kind=mark.kind, step=step, at_unix_s=at_s, text=mark.text, ref=mark.ref, count=1, last_step=step,
        last_unix_s=at_s,
    )  # fmt: skip


def _is_in(mark: MarkDocument, window: Window) -> bool:
    if mark.at_unix_s is not None:
        return window.holds(mark.at_unix_s)
    return window.is_whole or (mark.step is not None and window.holds_step(mark.step))


def _thinned(marks: Sequence[MarkDocument]) -> Iterable[MarkDocument]:
    """Return at most MAX_MARKS_OF_A_KIND of the marks. If there are more, one mark replaces a run of neighbors."""
    if len(marks) <= MAX_MARKS_OF_A_KIND:
        return marks
    ordered = sorted(marks, key=lambda mark: (mark.at_unix_s or 0.0, mark.step or 0))
    each = -(-len(ordered) // MAX_MARKS_OF_A_KIND)
    return [_together(ordered[place : place + each]) for place in range(0, len(ordered), each)]


def _together(marks: Sequence[MarkDocument]) -> MarkDocument:
    if len(marks) == 1:
        return marks[0]
    first, last = marks[0], marks[-1]
    return first.model_copy(
        update={
            "text": count_text(len(marks), _NAMES.get(first.kind, first.kind)),
            "ref": "",
            "count": len(marks),
            "last_step": last.step,
            "last_unix_s": last.at_unix_s,
        }
    )


def _change(change: ConfigChange) -> ConfigChangeDocument:
    return ConfigChangeDocument(
        round=change.round,
        first_step=change.first_step,
        at_unix_s=change.at_unix_s,
        keys=tuple(
            ChangedKeyDocument(key=printable(key.key), before=printable(key.before), after=printable(key.after))
            for key in change.keys
        ),
    )


def router(parts: DashboardParts) -> APIRouter:
    """Return the route that answers with the marks of the charts: incidents, notes, checkpoints, rounds and others."""
    routes = APIRouter(tags=["overview"])

    @routes.get("/marks", response_model=MarksDocument)
    def marks(request: Request, begin: From = "", end: To = "") -> Response:
        """Return incidents, notes, configuration changes, checkpoints, new rounds, and steps with non-finite numbers.

        If there are more than 200 of a kind, neighbors become one mark with their count.
        """
        window = parts.window(begin, end)
        versions = parts.source.live().versions
        key = ("marks", *(versions[topic] for topic in _TOPICS), window)
        return parts.responses.answer(request, key, lambda: marks_document(parts.source.facts(), window))

    return routes
