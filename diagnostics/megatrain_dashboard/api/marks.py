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
from megatrain_dashboard.responses.cache import cached_response, document_bytes
from megatrain_dashboard.responses.document import Document
from megatrain_dashboard.responses.query_parameters import From, To
from megatrain_dashboard.sources.facts import JobFacts
from megatrain_dashboard.sources.window import StepClock, Window
from megatrain_job.jobs.incident_phrases import KIND_TEXTS

MarkKind = Literal["incident", "note", "config", "checkpoint", "round", "bad"]
MAX_MARKS_OF_A_KIND = 200
"""If there are more, neighbours become one mark: a chart has space for about this number."""
_MAX_CHANGES = 200
_NAMED_KEYS = 3
_NAMES = {"bad": "step without a finite loss", "config": "configuration change", "round": "new round"}
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
    """A round that began with another configuration than the one before it."""

    round: int
    first_step: int
    at_unix_s: float
    keys: tuple[ChangedKeyDocument, ...]


class MarksDocument(Document):
    """The response of /marks: by time. `changes`: of the configuration, in the same part of the run."""

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
        _thinned([one for one in (_placed(mark, clock) for mark in kind) if _is_in(one, window)]) for kind in kinds
    ]
    marks = sorted((one for kind in shown for one in kind), key=lambda one: (one.at_unix_s or 0.0, one.kind))
    changes = [one for one in facts.changes if window.holds(one.at_unix_s)]
    return MarksDocument(marks=tuple(marks), changes=tuple(map(_change, changes[-_MAX_CHANGES:])))


def _incidents(facts: JobFacts) -> Iterator[_Mark]:
    for one in facts.incidents:
        yield _Mark("incident", one.last_step, one.moments.began, KIND_TEXTS[one.kind], one.incident_id)


def _notes(facts: JobFacts) -> Iterator[_Mark]:
    for one in facts.notes:
        if not one.is_retracted:
            yield _Mark("note", one.step, one.at_unix_s, f"{one.user}: {one.text}", one.note_id)


def _configs(facts: JobFacts) -> Iterator[_Mark]:
    for one in facts.changes:
        yield _Mark("config", one.first_step, one.at_unix_s, config_text(one), str(one.round))


def config_text(change: ConfigChange) -> str:
    """Return "round 3 began with optimizer.lr=0.001 instead of 0.0003"."""
    named = [
        f"{one.key}={one.after or 'nothing'} instead of {one.before or 'nothing'}" for one in change.keys[:_NAMED_KEYS]
    ]
    rest = len(change.keys) - len(named)
    more = f", and {count_text(rest, 'more key')} changed" if rest else ""
    return printable(f"round {change.round} began with {', '.join(named)}{more}")


def _checkpoints(facts: JobFacts) -> Iterator[_Mark]:
    survey = facts.checkpoints.survey
    for one in () if survey is None else survey.checkpoints:
        yield _Mark("checkpoint", one.step, one.written_unix_s, _checkpoint_text(one), str(one.step))


def _checkpoint_text(found: FoundCheckpoint) -> str:
    return printable(f"checkpoint of step {found.step:,}, {found.state}, branch {found.branch}")


def _rounds(facts: JobFacts) -> Iterator[_Mark]:
    """Yield a mark for each round after the first."""
    reached = {number: first for number, first, _ in facts.series.reached}
    for one in facts.rounds[1:]:
        if one.is_confirmed:
            yield _Mark(
                "round", reached.get(one.number), one.began_unix_s, f"round {one.number} began", str(one.number)
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
    """Return at most MAX_MARKS_OF_A_KIND of the marks. If there are more, one mark replaces a run of neighbours."""
    if len(marks) <= MAX_MARKS_OF_A_KIND:
        return marks
    ordered = sorted(marks, key=lambda one: (one.at_unix_s or 0.0, one.step or 0))
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
            ChangedKeyDocument(key=printable(one.key), before=printable(one.before), after=printable(one.after))
            for one in change.keys
        ),
    )


def router(parts: DashboardParts) -> APIRouter:
    """Return the route that answers with the marks of the charts: incidents, notes, checkpoints, rounds and others."""
    routes = APIRouter(tags=["overview"])

    @routes.get("/marks", response_model=MarksDocument)
    def marks(request: Request, begin: From = "", end: To = "") -> Response:
        """Return incidents, notes, configuration changes, checkpoints, new rounds, and steps with non-finite numbers.

        If there are more than 200 of a kind, neighbours become one mark with their count.
        """
        window = parts.window(begin, end)
        versions = parts.source.live().versions
        key = ("marks", *(versions[topic] for topic in _TOPICS), window)
        response = parts.responses.get(key, lambda: document_bytes(marks_document(parts.source.facts(), window)))
        return cached_response(request, response)

    return routes
