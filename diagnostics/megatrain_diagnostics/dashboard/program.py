"""The dashboard as a program: settings, source, server and announcement put together, until it is asked to stop."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatrain
from megatrain.config.dashboard import DashboardConfig
from megatrain.contracts.action_log import ACTIONS_NAME, ActionLog
from megatrain.contracts.diag_records import DashboardRecord
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.run_directory import RunDirectory
from megatrain.contracts.texts import count_text
from megatrain.coordination.announcement import Announcement
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.settings import EtcdSettings
from megatrain_diagnostics.dashboard.actions.carrying import EtcdHands
from megatrain_diagnostics.dashboard.actions.desk import ActionDesk
from megatrain_diagnostics.dashboard.app import Dashboard, make_app
from megatrain_diagnostics.dashboard.jobs.app import make_jobs_app
from megatrain_diagnostics.dashboard.security.made_token import with_token
from megatrain_diagnostics.dashboard.server import DashboardServer, listening_socket, url_of
from megatrain_diagnostics.dashboard.settings import DashboardSettings, settings_of
from megatrain_diagnostics.dashboard.sources.live_job import LiveJob
from megatrain_diagnostics.dashboard.sources.protocol import JobSource
from megatrain_diagnostics.dashboard.sources.recorded_job import RecordedJob
from megatrain_diagnostics.dashboard.sources.runs.catalog import JobCatalog

_logger = logging.getLogger(__name__)
_SWITCH_S = 0.001
"""Threads that read etcd and segments compute for long: each handover would make a request wait for 5 ms."""

Tell = Callable[[str], None]


def checked_settings(section: DashboardConfig, said: Mapping[str, Any]) -> DashboardSettings:
    """Return the settings of a section with what the command line says over it. Raises: ConfigError."""
    return settings_of(replace(section, **said), is_port_asked="port" in said)


def serve_live(
    client: EtcdClient,
    keys: JobKeys,
    run: RunDirectory,
    settings: DashboardSettings,
    stop: threading.Event,
    tell: Tell,
    *,
    is_announced: bool = True,
) -> bool:
    """Serve a running job until `stop` is set. Return whether every thread has ended.

    `is_announced`: etcd tells where the page is. A page with actions and no token has one made in the run directory.
    Raises: ConfigError when the address or port cannot be had, or such a token cannot be made.
    """
    settings, token_file = with_token(settings, run)
    desk = ActionDesk(EtcdHands(client, keys), ActionLog(run.diagnosis / ACTIONS_NAME))

    @contextmanager
    def announced(url: str, session: str) -> Iterator[None]:
        now_s, host = time.time(), socket.gethostname()
        record = DashboardRecord(url, session, now_s, megatrain.__version__, str(token_file or ""), host)
        consequence = "`megatrain status` does not show it"
        announcement = Announcement(client, keys.dashboard, record, name="the dashboard", consequence=consequence)
        try:
            yield
        finally:
            announcement.close()

    announcing = announced if is_announced else _told
    return _serve(lambda: LiveJob(client, keys, run), settings, desk, announcing, stop, _with_way_in(tell, token_file))


def serve_recorded(run: RunDirectory, settings: DashboardSettings, stop: threading.Event, tell: Tell) -> bool:
    """Serve the history of a run, as `serve_live` does."""

    return _serve(lambda: RecordedJob(run), settings, None, _told, stop, tell)


def serve_jobs(
    runs: Path | None, etcd: EtcdSettings | None, settings: DashboardSettings, stop: threading.Event, tell: Tell
) -> bool:
    """Serve all jobs below a directory and of an etcd, as `serve_live` does one. Raises: ConfigError."""
    if settings.enable_actions and settings.is_open:
        problem = "dashboard.enable_actions=true for many jobs needs to know who asks"
        raise ConfigError([f"{problem}; name a token by dashboard.operator_token_file"])
    sys.setswitchinterval(_SWITCH_S)
    with ExitStack() as closing:
        listening = closing.enter_context(listening_socket(settings))
        catalog = JobCatalog(runs, etcd)
        closing.callback(catalog.close)
        dashboard = make_jobs_app(catalog, settings)
        closing.callback(dashboard.open_jobs.close)
        server = DashboardServer(dashboard.app, listening, settings, dashboard)
        num_jobs = count_text(len(catalog.look().jobs), "job")
        tell(f"dashboard of {num_jobs} at {url_of(settings, listening)}jobs")
        stop.wait()
        _logger.info("the dashboard ends")
        return server.close()


def _with_way_in(tell: Tell, token_file: Path | None) -> Tell:
    """Return `tell` with what else must be known to get in."""
    return tell if token_file is None else lambda text: tell(f"{text} (sign in with the token in {token_file})")


@contextmanager
def _told(url: str, session: str) -> Iterator[None]:
    """Announce nothing: the page has printed its address to the person who started it."""
    yield


def _serve(
    open_source: Callable[[], JobSource],
    settings: DashboardSettings,
    desk: ActionDesk | None,
    announced: Callable[[str, str], Any],
    stop: threading.Event,
    tell: Tell,
) -> bool:
    sys.setswitchinterval(_SWITCH_S)
    with ExitStack() as closing:
        # before the source: an unavailable port is reported at once
        listening = closing.enter_context(listening_socket(settings))
        url = url_of(settings, listening)
        source = open_source()
        closing.callback(source.close)
        dashboard: Dashboard = make_app(source, settings, desk)
        server = DashboardServer(dashboard.app, listening, settings, dashboard.streams)
        tell(f"dashboard of job {source.job} at {url}")
        with announced(url, dashboard.session):
            stop.wait()
        _logger.info("the dashboard ends")
        return server.close()
