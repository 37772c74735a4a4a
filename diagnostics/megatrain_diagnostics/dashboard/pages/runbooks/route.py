"""GET /runbooks and /runbooks/{name}."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from megatrain.contracts.incident import Incident
from megatrain.jobs.own_etcd import ENDPOINT_FILE
from megatrain_diagnostics.dashboard.answers.answer import document_answer
from megatrain_diagnostics.dashboard.answers.errors import not_found, shown
from megatrain_diagnostics.dashboard.pages.runbooks.document import (
    RunbookDocument,
    RunbookNameDocument,
    RunbooksDocument,
)
from megatrain_diagnostics.dashboard.pages.runbooks.filling import Names
from megatrain_diagnostics.dashboard.pages.runbooks.markdown import Runbook
from megatrain_diagnostics.dashboard.parts import Parts
from megatrain_diagnostics.dashboard.sources.protocol import JobSource

_NO_PAGE = "README.md"
"""It leads to the others by what `megatrain status` says, which the page shows itself."""


@cache
def installed_runbooks() -> Mapping[str, Runbook]:
    """Return the runbooks of this installation, by name. No path of a request touches the file system."""
    directory = resources.files("megatrain_diagnostics") / "runbooks"
    if not directory.is_dir():
        return {}
    pages = (file for file in directory.iterdir() if file.name.endswith(".md") and file.name != _NO_PAGE)
    found = (Runbook(file.name, file.read_text(encoding="utf-8")) for file in pages)
    return {one.name: one for one in sorted(found, key=lambda one: one.title)}


def router(parts: Parts) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(tags=["runbooks"])
    source = parts.source

    @routes.get("/runbooks", response_model=RunbooksDocument)
    def runbooks() -> Response:
        """Return which runbooks there are."""
        names = (RunbookNameDocument(name=one.name, title=one.title) for one in installed_runbooks().values())
        return document_answer(RunbooksDocument(runbooks=tuple(names)))

    @routes.get("/runbooks/{name}", response_model=RunbookDocument)
    def runbook(
        name: Annotated[str, Path(max_length=64)], incident: Annotated[str, Query(max_length=256)] = ""
    ) -> Response:
        """Return a runbook as steps, its commands with the job's names and with those of an incident."""
        found = installed_runbooks().get(name)
        if found is None:
            there = ", ".join(installed_runbooks()) or "none in this installation"
            raise not_found(f"runbook {shown(name)}: no such page; there are {there}")
        known = next((one for one in source.facts().incidents if one.incident_id == incident), None)
        if incident and known is None:
            raise not_found(f"incident {shown(incident)}: no such incident, so no command can name its host")
        steps = found.steps(names_of(source, known))
        return document_answer(RunbookDocument(name=name, title=found.title, incident_id=incident, steps=steps))

    return routes


def names_of(source: JobSource, incident: Incident | None) -> Names:
    """Return what commands name: of an incident its first culprit, where it has one."""
    run = source.run.root.resolve()
    etcd = "" if (run / ENDPOINT_FILE).exists() else source.etcd_endpoints
    if incident is None:
        return Names(source.job, str(run), etcd)
    return Names(
        source.job, str(run), etcd,
        host=next(iter(incident.culprit_hosts), ""), rank=min(incident.culprit_ranks, default=None),
        round=incident.round or None, step=incident.last_step, incident=incident.incident_id, verdict=incident.verdict,
    )  # fmt: skip
