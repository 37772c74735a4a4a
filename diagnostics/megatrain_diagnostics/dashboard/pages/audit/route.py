"""GET /audit: what was done after verdicts and what people asked for through the page, the newest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.action_log import (
    ACTIONS_NAME,
    INTENT,
    ActionEntry,
    ActionTrail,
    read_actions,
)
from megatrain.contracts.audit import AUDIT_NAME, read_audit
from megatrain.contracts.host_verdict import AuditEntry
from megatrain.contracts.texts import names_text
from megatrain_diagnostics.dashboard.actions.desk import ActionDesk
from megatrain_diagnostics.dashboard.answers.answer import cached_answer, document_bytes
from megatrain_diagnostics.dashboard.answers.errors import unavailable
from megatrain_diagnostics.dashboard.answers.questions import From, To
from megatrain_diagnostics.dashboard.pages.audit.document import AuditDocument, AuditEntryDocument
from megatrain_diagnostics.dashboard.parts import Parts
from megatrain_diagnostics.dashboard.sources.window import WHOLE_RUN, Window

_MAX_ENTRIES = 1000


def router(parts: Parts, desk: ActionDesk | None) -> APIRouter:
    """Return the route of the audit. `desk`: who wrote to it last, and knows whether that is still there."""
    routes = APIRouter(tags=["incidents"])

    @routes.get("/audit", response_model=AuditDocument)
    def audit(request: Request, begin: From = "", end: To = "") -> Response:
        """Return both audits as one, at most the newest 1000 entries, and where the chain of people's own breaks."""
        window = parts.window(begin, end)
        run = parts.source.run
        driver, people = run.incidents / AUDIT_NAME, run.diagnosis / ACTIONS_NAME
        key = ("audit", _stamp(driver), _stamp(people), window)
        trail = (lambda: read_actions(people)) if desk is None else desk.trail
        make = partial(audit_document, driver, trail, window)
        return cached_answer(request, parts.answers.get(key, lambda: document_bytes(make())))

    return routes


def audit_document(driver: Path, people: Callable[[], ActionTrail], window: Window = WHOLE_RUN) -> AuditDocument:
    """Return what the driver's file and the trail of people hold of a part of the run.

    Raises: RefusalError where one cannot be read.
    """
    try:
        outcomes, num_damaged = read_audit(driver)
        trail = people()
    except OSError as error:
        raise unavailable(f"the audit cannot be read: {error.strerror or error}") from error
    told = (*map(_of_driver, outcomes), *_of_people(trail.entries))
    entries = [one for one in told if window.holds(one.at_unix_s)]
    entries.sort(key=lambda one: one.at_unix_s, reverse=True)
    problems = [trail.problem, f"{AUDIT_NAME}: {num_damaged} lines are damaged" if num_damaged else ""]
    return AuditDocument(entries=tuple(entries[:_MAX_ENTRIES]), chain_problem="; ".join(filter(None, problems)))


def _of_driver(entry: AuditEntry) -> AuditEntryDocument:
    outcome, verdict = entry.outcome, entry.verdict
    return AuditEntryDocument(
        at_unix_s=outcome.at_unix_s,
        source="driver",
        actor=outcome.by or outcome.driver,
        action=f"verdict: {outcome.kind}",
        target=names_text(verdict.hosts) if verdict is not None and verdict.hosts else outcome.verdict_id,
        reason=outcome.reason,
        result=outcome.incident,
        entry_hash="",
    )


def _of_people(entries: tuple[ActionEntry, ...]) -> Iterator[AuditEntryDocument]:
    """Yield an entry for each action: its end, or its begin where that is all there is."""
    newest = {one.action_id: one for one in entries}
    for entry in newest.values():
        is_open = entry.stage == INTENT
        yield AuditEntryDocument(
            at_unix_s=entry.at_unix_s,
            source="dashboard" if entry.address else "command line",
            actor=entry.user,
            action=entry.kind,
            target=entry.target,
            reason=entry.reason,
            result="begun; how it ended was not written down" if is_open else entry.text,
            entry_hash=entry.entry_hash,
        )


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)
