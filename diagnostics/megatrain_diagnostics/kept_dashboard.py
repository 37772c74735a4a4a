"""The dashboard beside the daemon: a process of its own that the daemon starts, starts again, and ends.

So what people ask of the page never delays the ingest, and the page comes back whatever happens to it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.commands.etcd_flags import etcd_environment, etcd_words
from megatrain.contracts.run_directory import RunDirectory
from megatrain.programs.child_process import ChildProcess
from megatrain.programs.kept_program import keep_running
from megatrain_diagnostics.collector.settings import DaemonSettings

_logger = logging.getLogger(__name__)
_PACKAGES = ("fastapi", "uvicorn")
_STOP_S = 5.0
"""The page's streams are ended in two."""


@contextmanager
def kept_dashboard(settings: DaemonSettings) -> Iterator[None]:
    """Have the job's dashboard run during the block; its output goes to <run>/logs/dashboard.log.

    What keeps it from running is told, and keeps nobody else from anything.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        _logger.warning("no web page: %s missing; pip install 'megatrain[diagnostics]'", " and ".join(missing))
        yield
        return
    closed = threading.Event()
    # the kernel ends the child when this thread does
    thread = threading.Thread(
        target=keep_running, args=("the dashboard", lambda: _start(settings), closed, _logger.warning), name="dashboard"
    )
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()


def _start(settings: DaemonSettings) -> ChildProcess:
    log = RunDirectory(settings.run).logs / "dashboard.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "megatrain_diagnostics.dashboard", "--run", str(settings.run), "--job", settings.job]
    environment = {**os.environ, **etcd_environment(settings.etcd)}
    return ChildProcess([*words, *etcd_words(settings.etcd)], log=log, environment=environment, stop_s=_STOP_S)
