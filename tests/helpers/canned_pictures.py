"""The small pictures of an incident's page as responses: those of the recorded sample, read once from the real
routes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import cache

from megatrain.run_files.run_directory import RunDirectory
from tests.helpers.served_run import RecordedPage
from tests.helpers.source_tree import ROOT


@cache
def picture_responses() -> Mapping[str, bytes]:
    """Return path -> container of arrays."""
    with closing(RecordedPage(RunDirectory(ROOT / "tests" / "golden" / "dashboard-sample"))) as page:
        return {path: page.client.get(f"/api/v1/{path}?round=2").content for path in ("grid", "heat")}
