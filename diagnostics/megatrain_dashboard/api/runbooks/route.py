"""GET /runbooks and /runbooks/{name}."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from megatrain.contracts.records.incident import Incident
from megatrain_dashboard.api.runbooks.document import (
    RunbookDocument,
    RunbookNameDocument,
    RunbooksDocument,
)
from megatrain_dashboard.api.runbooks.filling import Names
from megatrain_dashboard.api.runbooks.markdown import Runbook
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import document_response
from megatrain_dashboard.responses.errors import not_found, shown
from megatrain_dashboard.sources.protocol import JobSource
from megatrain_job.jobs.own_etcd import ENDPOINT_FILE

_NO_PAGE = "README.md"
"""This file leads from the output of `megatrain status` to the other runbooks; the page shows that output itself."""


@cache
def installed_runbooks() -> Mapping[str, Runbook]:
    """Return the runbooks of this installation, by name. No request path reaches the file system."""
    directory = resources.files("megatrain_dashboard") / "runbooks"
    if not directory.is_dir():
        return {}
    pages = (file for file in directory.iterdir() if file.name.endswith(".md") and file.name != _NO_PAGE)
    found = (Runbook(file.name, file.read_text(encoding="utf-8")) for file in pages)
    return {runbook.name: runbook for runbook in sorted(found, key=lambda runbook: runbook.title)}


def router(parts: DashboardParts) -> APIRouter:
    """Return the routes that answer with the list of runbooks, and with one of them, filled in for this job."""
    routes = APIRouter(tags=["runbooks"])
    source = parts.source

    @routes.get("/runbooks", response_model=RunbooksDocument)
    def runbooks() -> Response:
        """Return the list of runbooks."""
        names = (
            RunbookNameDocument(name=runbook.name, title=runbook.title) for runbook in installed_runbooks().values()
        )
        return document_response(RunbooksDocument(runbooks=tuple(names)))

    @routes.get("/runbooks/{name}", response_model=RunbookDocument)
    def runbook(
        name: Annotated[str, Path(max_length=64)], incident: Annotated[str, Query(max_length=256)] = ""
    ) -> Response:
        """Return a runbook as steps; its commands contain the names of the job and of an incident."""
        found = installed_runbooks().get(name)
        if found is None:
            there = ", ".join(installed_runbooks()) or "none in this installation"
            raise not_found(f"runbook {shown(name)}: no such page; there are {there}")
        known = next((known for known in source.facts().incidents if known.incident_id == incident), None)
        if incident and known is None:
            raise not_found(f"incident {shown(incident)}: no such incident, so no command can name its host")
        steps = found.steps(names_of(source, known))
        return document_response(RunbookDocument(name=name, title=found.title, incident_id=incident, steps=steps))

    return routes


def names_of(source: JobSource, incident: Incident | None) -> Names:
    """Return the names for commands; with an incident that has culprits, the names of its first culprit."""
    run = source.run.root.resolve()
    etcd = "" if (run / ENDPOINT_FILE).exists() else source.etcd_endpoints
    if incident is None:
        return Names(source.job, str(run), etcd)
    return Names(
        source.job, str(run), etcd,
        host=next(iter(incident.culprit_hosts), ""), rank=min(incident.culprit_ranks, default=None),
        round=incident.round or None, step=incident.last_step, incident=incident.incident_id, verdict=incident.verdict,
    )  # fmt: skip
