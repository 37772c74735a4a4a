"""GET /audit: what the driver did after verdicts and what people requested, the newest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.records.host_verdict import AuditEntry
from megatrain.formatting import count_text, names_text
from megatrain.run_files.action_log import (
    ACTIONS_NAME,
    INTENT,
    ActionEntry,
    ActionTrail,
    read_actions,
)
from megatrain.run_files.incidents import AUDIT_NAME, read_audit
from megatrain_dashboard.actions.handler import ActionHandler
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import file_version
from megatrain_dashboard.responses.document import Document
from megatrain_dashboard.responses.errors import unavailable
from megatrain_dashboard.responses.query_parameters import From, To
from megatrain_dashboard.sources.window import WHOLE_RUN, Window

_MAX_ENTRIES = 1000


class AuditEntryDocument(Document):
    """One action: by the driver after a verdict, or by a person, through this page or with `megatrain annotate`."""

    at_unix_s: float
    source: str
    """driver, dashboard or command line."""
    actor: str
    action: str
    target: str
    reason: str
    result: str
    entry_hash: str
    """The hash of an entry of the dashboard; each entry contains the hash of the previous entry."""


class AuditDocument(Document):
    """The response of /audit: the newest entry first.

    `chain_problem`: where the chain of hashes breaks, and how many lines of the driver cannot be read; or empty.
    """

    entries: tuple[AuditEntryDocument, ...]
    chain_problem: str


def router(parts: DashboardParts, handler: ActionHandler | None) -> APIRouter:
    """Return the route of the audit. `handler` remembers the last entry, so that its removal is detected."""
    routes = APIRouter(tags=["incidents"])

    @routes.get("/audit", response_model=AuditDocument)
    def audit(request: Request, begin: From = "", end: To = "") -> Response:
        """Return the newest 1000 entries of both audits together, and where the hash chain of actions breaks."""
        window = parts.window(begin, end)
        run = parts.source.run
        driver, people = run.incidents / AUDIT_NAME, run.diagnosis / ACTIONS_NAME
        key = ("audit", file_version(driver), file_version(people), window)
        trail = (lambda: read_actions(people)) if handler is None else handler.trail
        return parts.responses.answer(request, key, partial(audit_document, driver, trail, window))

    return routes


def audit_document(driver: Path, people: Callable[[], ActionTrail], window: Window = WHOLE_RUN) -> AuditDocument:
    """Return the entries of the driver's file and of people's actions in a part of the run.

    Raises: RefusalError where one of them cannot be read.
    """
    try:
        outcomes, num_damaged = read_audit(driver)
        trail = people()
    except OSError as error:
        raise unavailable(f"the audit cannot be read: {error.strerror or error}") from error
    all_entries = (*map(_of_driver, outcomes), *_of_people(trail.entries))
    entries = [entry for entry in all_entries if window.holds(entry.at_unix_s)]
    entries.sort(key=lambda entry: entry.at_unix_s, reverse=True)
    damage = f"{AUDIT_NAME}: {count_text(num_damaged, 'line')} cannot be read" if num_damaged else ""
    problems = [trail.problem, damage]
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
    """Yield one entry for each action: its result, or its request where there is no result."""
    newest = {entry.action_id: entry for entry in entries}
    for entry in newest.values():
        is_open = entry.stage == INTENT
        yield AuditEntryDocument.of(
            entry,
            source="dashboard" if entry.address else "command line",
            actor=entry.user,
            action=entry.kind,
            result="begun; the result was not recorded" if is_open else entry.text,
        )
