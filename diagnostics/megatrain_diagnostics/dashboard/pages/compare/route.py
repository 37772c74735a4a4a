"""GET /compare: some of the jobs of this server side by side."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from megatrain.config.serialize import config_values
from megatrain.contracts.printable import printable
from megatrain.contracts.run_directory import RunDirectory
from megatrain_diagnostics.dashboard.answers.answer import cached_answer, document_bytes
from megatrain_diagnostics.dashboard.answers.errors import bad_query, not_found, shown
from megatrain_diagnostics.dashboard.answers.questions import Step, check_steps
from megatrain_diagnostics.dashboard.pages.compare.document import CompareDocument
from megatrain_diagnostics.dashboard.pages.compare.view import RunInputs, compare_document
from megatrain_diagnostics.dashboard.parts import JobsParts
from megatrain_diagnostics.dashboard.sources.run_files import read_config
from megatrain_diagnostics.dashboard.sources.runs.catalog import JobSeen
from megatrain_diagnostics.dashboard.sources.runs.course import EMPTY, read_course
from megatrain_diagnostics.dashboard.sources.runs.glance import signature_of
from megatrain_diagnostics.dashboard.sources.runs.time_spent import time_of

COURSE_BYTES = 8 * 2**20
"""Of the metrics of each run: some twenty thousand steps whole."""
_LEAST, _MOST = 2, 4
"""Runs: one has a page of its own, and of more than four nobody tells the lines apart."""


def router(parts: JobsParts) -> APIRouter:
    """Return the route."""
    routes = APIRouter(tags=["jobs"])

    @routes.get("/compare", response_model=CompareDocument, dependencies=[parts.heavy_question])
    def compare(
        request: Request,
        jobs: Annotated[str, Query(max_length=2000)],
        first: Step = None,
        last: Step = None,
        points: Annotated[int, Query(ge=2, le=2000)] = 400,
    ) -> Response:
        """Return the runs of two to four jobs, by name with commas between."""
        check_steps(first, last)
        seen = _named(parts, jobs)

        def make() -> bytes:
            runs = [_inputs(one, parts.clock()) for one in seen]
            return document_bytes(compare_document(runs, parts.clock(), first=first, last=last, points=points))

        changes = tuple(one.glance and signature_of(one.glance.root) for one in seen)
        key = ("compare", tuple(one.name for one in seen), changes, first, last, points)
        return cached_answer(request, parts.answers.get(key, make))

    return routes


def _named(parts: JobsParts, text: str) -> list[JobSeen]:
    """Return the jobs that a question names. Raises: RefusalError."""
    names = list(dict.fromkeys(part for part in text.split(",") if part))
    if not _LEAST <= len(names) <= _MOST:
        raise bad_query("jobs", text, f"expected {_LEAST} to {_MOST} names of jobs, with commas between")
    known = parts.catalog.look().jobs
    for name in names:
        if name not in known:
            raise not_found(f"jobs={shown(name)}: no such job; jobs tells which there are")
    return [known[name] for name in names]


def _inputs(seen: JobSeen, now_s: float) -> RunInputs:
    """Read what is compared of a job; what cannot be read is reported."""
    glance = seen.glance
    if glance is None:
        return RunInputs(seen.name, seen.name, EMPTY, None, problems=("its run directory is not on this machine",))
    run, problems, course = RunDirectory(glance.root), [], EMPTY
    config, problem = read_config(run)
    problems.append(problem or ("" if config is not None else "config.toml: there is none"))
    try:
        course = read_course(run, COURSE_BYTES)
    except OSError as error:
        problems.append(f"metrics/metrics.jsonl {error.strerror}")
    spent = time_of(seen, now_s)
    return RunInputs(
        name=seen.name,
        job=glance.job,
        course=course,
        values=None if config is None else config_values(config),
        num_incidents=glance.num_incidents,
        effective_time_ratio=spent.ratio,
        training_s=spent.training_s,
        problems=tuple(printable(text) for text in problems if text),
    )
