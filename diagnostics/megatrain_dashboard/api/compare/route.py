"""GET /compare: some of the jobs of this server side by side."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from megatrain.config.serialize import config_values
from megatrain.formatting.terminal import printable
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.api.compare.document import CompareDocument
from megatrain_dashboard.api.compare.view import RunInputs, compare_document
from megatrain_dashboard.parts import JobsParts
from megatrain_dashboard.responses.cache import cached_response, document_bytes
from megatrain_dashboard.responses.errors import bad_query, not_found, shown
from megatrain_dashboard.responses.query_parameters import Step, check_steps
from megatrain_dashboard.sources.run_files import read_config
from megatrain_dashboard.sources.runs.catalog import JobSeen
from megatrain_dashboard.sources.runs.metrics_history import EMPTY, read_metrics_history
from megatrain_dashboard.sources.runs.run_summary import signature_of
from megatrain_dashboard.sources.runs.time_spent import time_of

HISTORY_BYTES = 8 * 2**20
"""Read from the metrics of each run: about twenty thousand steps without gaps."""
_MIN_RUNS, _MAX_RUNS = 2, 4
"""Number of runs. One run has its own page; the lines of more than four are hard to distinguish."""


def router(parts: JobsParts) -> APIRouter:
    """Return the route that answers with the charts and configurations of some jobs side by side."""
    routes = APIRouter(tags=["jobs"])

    @routes.get("/compare", response_model=CompareDocument, dependencies=[parts.heavy_query])
    def compare(
        request: Request,
        jobs: Annotated[str, Query(max_length=2000)],
        first: Step = None,
        last: Step = None,
        points: Annotated[int, Query(ge=2, le=2000)] = 400,
    ) -> Response:
        """Return the runs of two to four jobs, named with commas between."""
        check_steps(first, last)
        seen = _named(parts, jobs)

        def make() -> bytes:
            runs = [_inputs(one, parts.clock()) for one in seen]
            return document_bytes(compare_document(runs, parts.clock(), first=first, last=last, points=points))

        changes = tuple(one.summary and signature_of(one.summary.root) for one in seen)
        key = ("compare", tuple(one.name for one in seen), changes, first, last, points)
        return cached_response(request, parts.responses.get(key, make))

    return routes


def _named(parts: JobsParts, text: str) -> list[JobSeen]:
    """Return the jobs that a request names. Raises: RefusalError."""
    names = list(dict.fromkeys(part for part in text.split(",") if part))
    if not _MIN_RUNS <= len(names) <= _MAX_RUNS:
        raise bad_query("jobs", text, f"expected {_MIN_RUNS} to {_MAX_RUNS} names of jobs, separated by commas")
    known = parts.catalog.last_poll().jobs
    for name in names:
        if name not in known:
            raise not_found(f"jobs={shown(name)}: no such job; api/v1/jobs lists the jobs")
    return [known[name] for name in names]


def _inputs(seen: JobSeen, now_s: float) -> RunInputs:
    """Read the data of a job that is compared, and report what cannot be read."""
    summary = seen.summary
    if summary is None:
        return RunInputs(seen.name, seen.name, EMPTY, None, problems=("its run directory is not on this machine",))
    run, problems, history = RunDirectory(summary.root), [], EMPTY
    config, problem = read_config(run)
    problems.append(problem or ("" if config is not None else "config.toml is missing"))
    try:
        history = read_metrics_history(run, HISTORY_BYTES)
    except OSError as error:
        problems.append(f"metrics/metrics.jsonl {error.strerror}")
    spent = time_of(seen, now_s)
    return RunInputs(
        name=seen.name,
        job=summary.job,
        history=history,
        values=None if config is None else config_values(config),
        num_incidents=summary.num_incidents,
        effective_time_ratio=spent.ratio,
        training_s=spent.training_s,
        problems=tuple(printable(text) for text in problems if text),
    )
