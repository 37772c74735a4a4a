"""Prints or writes the description of the HTTP API: `python -m megatrain_dashboard.openapi`.

With --jobs it describes the API of a server of many jobs. No job is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fastapi import FastAPI

from megatrain.commands.argument_types import utf8_path
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.app import make_app
from megatrain_dashboard.jobs.app import make_jobs_app
from megatrain_dashboard.settings import DashboardSettings
from megatrain_dashboard.sources.recorded_job import RecordedJob
from megatrain_dashboard.sources.runs.catalog import JobCatalog


def written(app: FastAPI) -> str:
    """Return the description as text, in the form of docs/reference/openapi.json."""
    return json.dumps(app.openapi(), indent=1, sort_keys=True) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatrain_dashboard.openapi", allow_abbrev=False)
    parser.add_argument("--output", type=utf8_path, metavar="FILE", help="file to write (default: standard output)")
    parser.add_argument(
        "--jobs", action="store_true", dest="has_many", help="describe the API of a server of many jobs"
    )
    args = parser.parse_args(arguments)
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
