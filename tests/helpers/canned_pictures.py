"""The small pictures of an incident's page as responses: those of the recorded sample, read once from the real
routes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from fastapi.testclient import TestClient

from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.app import make_app
from megatrain_dashboard.settings import DashboardSettings
from megatrain_dashboard.sources.recorded_job import RecordedJob
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import wait_until


@cache
def picture_responses() -> Mapping[str, bytes]:
    """Return path -> container of arrays."""
    source = RecordedJob(RunDirectory(ROOT / "tests" / "golden" / "dashboard-sample"))
    try:
        wait_until(source.has_polled, "the run to be read")
        client = TestClient(make_app(source, DashboardSettings(port=0)).app, base_url="http://127.0.0.1:8777")
        return {path: client.get(f"/api/v1/{path}?round=2").content for path in ("grid", "heat")}
    finally:
        source.close()
