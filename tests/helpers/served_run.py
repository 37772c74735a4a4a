"""The dashboard's real server in this process, for the history of a run, with limits that no slow machine reaches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.app import make_app
from megatrain_dashboard.server import DashboardServer, listening_socket
from megatrain_dashboard.settings import DashboardSettings, Limits
from megatrain_dashboard.sources.recorded_job import RecordedJob
from tests.helpers.waiting import DEADLINE_S

PATIENT_LIMITS = Limits(log_search_s=DEADLINE_S, log_causes_s=DEADLINE_S)
"""A search of logs ends when it is complete, not at its time limit."""


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
