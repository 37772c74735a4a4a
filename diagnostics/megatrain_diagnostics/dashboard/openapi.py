"""The description of the HTTP API: <prefix>/openapi.json, and `python -m megatrain_diagnostics.dashboard.openapi`; with
--jobs of a server of many jobs.

Made from the routes and the documents of the pages: it cannot differ from what is answered.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fastapi import Depends, FastAPI
from starlette.responses import Response

from megatrain.commands.argument_types import utf8_path
from megatrain_diagnostics.dashboard.answers.answer import JSON_TYPE
from megatrain_diagnostics.dashboard.answers.errors import check_query


def add_openapi(app: FastAPI, prefix: str) -> None:
    """Have `app` describe itself. To be called after all routes of the API are there."""

    @app.get(f"{prefix}/openapi.json", include_in_schema=False, dependencies=[Depends(check_query)])
    async def openapi_json() -> Response:
        return Response(json.dumps(description(app)), media_type=JSON_TYPE)


def description(app: FastAPI) -> dict[str, object]:
    """Return the OpenAPI document."""
    document: dict[str, object] = app.openapi()
    return document


def written(app: FastAPI) -> str:
    """Return the description as docs/reference/openapi.json has it."""
    return json.dumps(description(app), indent=1, sort_keys=True) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """Print or write the description, for which no job is needed."""
    from megatrain.contracts.run_directory import RunDirectory
    from megatrain_diagnostics.dashboard.app import make_app
    from megatrain_diagnostics.dashboard.jobs.app import make_jobs_app
    from megatrain_diagnostics.dashboard.settings import DashboardSettings
    from megatrain_diagnostics.dashboard.sources.recorded_job import RecordedJob
    from megatrain_diagnostics.dashboard.sources.runs.catalog import JobCatalog

    parser = argparse.ArgumentParser(prog="python -m megatrain_diagnostics.dashboard.openapi", allow_abbrev=False)
    parser.add_argument("--output", type=utf8_path, metavar="FILE", help="default: print it")
    parser.add_argument("--jobs", action="store_true", dest="has_many", help="of a server of many jobs")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as directory:
        source = RecordedJob(RunDirectory(Path(directory)))
        catalog = JobCatalog(Path(directory))
        try:
            made = make_jobs_app(catalog, DashboardSettings(), files={}) if args.has_many else None
            text = written((made or make_app(source, DashboardSettings(), files={})).app)
        finally:
            source.close()
            catalog.close()
    if args.output is None:
        print(text, end="")
    else:
        args.output.write_text(text, encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
