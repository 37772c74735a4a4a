"""The dashboard as a program: it assembles settings, source, server and announcement, and serves until it must stop."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain.config.dashboard import DashboardConfig
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.records.diag_records import DashboardRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.formatting import count_text
from megatrain.run_files.action_log import ACTIONS_NAME, ActionLog
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.actions.backend import EtcdBackend
from megatrain_dashboard.actions.handler import ActionHandler
from megatrain_dashboard.app import Dashboard, make_app
from megatrain_dashboard.jobs.app import make_jobs_app
from megatrain_dashboard.security.made_token import with_token
from megatrain_dashboard.server import DashboardServer, listening_socket, url_of
from megatrain_dashboard.settings import DashboardSettings, settings_of
from megatrain_dashboard.sources.live_job import LiveJob
from megatrain_dashboard.sources.protocol import JobSource
from megatrain_dashboard.sources.recorded_job import RecordedJob
from megatrain_dashboard.sources.runs.catalog import JobCatalog
from megatrain_job.coordination.announcement import Announcement
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings

_logger = logging.getLogger(__name__)
_SWITCH_S = 0.001
"""The switch interval of threads. Threads that read etcd and segments compute for long, so with Python's default each
thread switch would delay a request by 5 ms."""

Report = Callable[[str], None]


def checked_settings(section: DashboardConfig, given: Mapping[str, Any]) -> DashboardSettings:
    """Return the settings of a section; options of the command line take precedence. Raises: ConfigError."""
    return settings_of(replace(section, **given), is_port_asked="port" in given)


def serve_live(
    client: EtcdClient,
    keys: JobKeys,
    run: RunDirectory,
    settings: DashboardSettings,
    stop: threading.Event,
    report: Report,
    *,
    is_announced: bool = True,
) -> bool:
    """Serve a running job until `stop` is set. Return whether every thread has ended.

    `is_announced`: the address of the page is written to etcd. For a page with actions and no token, a token is made in
    the run directory.
    Raises: ConfigError when the address or port cannot be used, or the token cannot be made.
    """
    settings, token_file = with_token(settings, run)
    handler = ActionHandler(EtcdBackend(client, keys), ActionLog(run.diagnosis / ACTIONS_NAME))

    @contextmanager
    def announced(url: str, session: str) -> Iterator[None]:
        host = socket.gethostname()
        record = DashboardRecord(url, session, str(token_file or ""), host)
        consequence = "`megatrain status` does not show it"
        announcement = Announcement(client, keys.dashboard, record, name="the dashboard", consequence=consequence)
        try:
            yield
        finally:
            announcement.close()

    announcing = announced if is_announced else _unannounced
    return _serve(
        lambda: LiveJob(client, keys, run), settings, handler, announcing, stop, _with_token_file(report, token_file)
    )


def serve_recorded(run: RunDirectory, settings: DashboardSettings, stop: threading.Event, report: Report) -> bool:
    """Serve the history of a run, as `serve_live` does."""

    return _serve(lambda: RecordedJob(run), settings, None, _unannounced, stop, report)


def serve_jobs(
    runs: Path | None, etcd: EtcdSettings | None, settings: DashboardSettings, stop: threading.Event, report: Report
) -> bool:
    """Serve all jobs below a directory and of an etcd, as `serve_live` serves one. Raises: ConfigError."""
    if settings.enable_actions and settings.is_open:
        problem = "dashboard.enable_actions=true for many jobs needs a login"
        raise ConfigError([f"{problem}; name a token file with dashboard.operator_token_file"])
    sys.setswitchinterval(_SWITCH_S)
    with ExitStack() as closing:
        listening = closing.enter_context(listening_socket(settings))
        catalog = JobCatalog(runs, etcd)
        closing.callback(catalog.close)
        dashboard = make_jobs_app(catalog, settings)
        closing.callback(dashboard.open_jobs.close)
        server = DashboardServer(dashboard.app, listening, settings, dashboard)
        num_jobs = count_text(len(catalog.last_poll().jobs), "job")
        report(f"dashboard of {num_jobs} at {url_of(settings, listening)}jobs")
        stop.wait()
        _logger.info("the dashboard is shutting down")
        return server.close()


def _with_token_file(report: Report, token_file: Path | None) -> Report:
    """Return a `report` that also names the file with the token for the login, if there is one."""
    return report if token_file is None else lambda text: report(f"{text} (sign in with the token in {token_file})")


@contextmanager
def _unannounced(url: str, session: str) -> Iterator[None]:
    """Announce nothing, because the page has printed its address to the person who started it."""
    yield


def _serve(
    open_source: Callable[[], JobSource],
    settings: DashboardSettings,
    handler: ActionHandler | None,
    announced: Callable[[str, str], Any],
    stop: threading.Event,
    report: Report,
) -> bool:
    sys.setswitchinterval(_SWITCH_S)
    with ExitStack() as closing:
        # opened before the source, so that an unavailable port is reported at once
        listening = closing.enter_context(listening_socket(settings))
        url = url_of(settings, listening)
        source = open_source()
        closing.callback(source.close)
        dashboard: Dashboard = make_app(source, settings, handler)
        server = DashboardServer(dashboard.app, listening, settings, dashboard.streams)
        report(f"dashboard of job {source.job} at {url}")
        with announced(url, dashboard.session):
            stop.wait()
        _logger.info("the dashboard is shutting down")
        return server.close()
