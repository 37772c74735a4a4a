"""The dashboard of the history of a run in this process: its real server, or its application with a client.

No slow machine reaches its limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.app import make_app
from megatrain_dashboard.server import DashboardServer, listening_socket
from megatrain_dashboard.settings import DashboardSettings, Limits
from megatrain_dashboard.sources.recorded_job import RecordedJob
from tests.helpers.waiting import DEADLINE_S

NOW_S = 1_800_000_000.0
"""The time of the clock of a RecordedPage, in unix seconds."""
PATIENT_LIMITS = Limits(log_search_s=DEADLINE_S, log_causes_s=DEADLINE_S)
"""A search of logs ends when it is complete, not at its time limit."""


class RecordedPage:
    """The application of a recorded run, which has been read once, and a client. `close` ends the threads."""

    def __init__(self, run: RunDirectory) -> None:
        self.run, self.source = run, RecordedJob(run)
        assert self.source.wait_for_poll(DEADLINE_S), "the run was not read"
        settings = DashboardSettings(port=0, limits=PATIENT_LIMITS)
        app = make_app(self.source, settings, clock=lambda: NOW_S).app
        self.client = TestClient(app, base_url="http://127.0.0.1:8777")

    def ask(self, path: str, status: int = 200, **query: Any) -> Any:
        """Return the JSON of a path of the API, whose response must have `status`."""
        response = self.client.get(f"/api/v1/{path}", params=query or None)
        assert response.status_code == status, response.text
        return response.json()

    def close(self) -> None:
        self.source.close()


@contextmanager
def served_run(directory: Path) -> Iterator[str]:
    """Run the real server at any free port of this machine; yield its URL."""
    settings = DashboardSettings(port=0, is_port_asked=True)
    source = RecordedJob(RunDirectory(directory))
    try:
        dashboard = make_app(source, settings)
        with listening_socket(settings) as listening:
            server = DashboardServer(dashboard.app, listening, settings, dashboard.streams)
            try:
                yield f"http://127.0.0.1:{server.port}/"
            finally:
                assert server.close(), "the server did not end"
    finally:
        source.close()
