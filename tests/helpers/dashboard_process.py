"""A job's dashboard as a separate process, as a launch starts it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatrain.config.dashboard import DashboardConfig
from megatrain.contracts.records.record import encode
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S, wait_until


@dataclass
class DashboardProcess:
    """`port` 0 takes a free port; a restarted dashboard uses the same port."""

    run: Path
    job: str
    urls: Sequence[str]
    log: Path
    flags: Sequence[str] = ()
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        """Start it and wait until it serves."""
        self.log.write_bytes(b"")
        command = [
            sys.executable, "-m", "megatrain_dashboard", "--run", str(self.run), "--job", self.job,
            "--rdzv-endpoint", ",".join(self.urls), "--port", str(self.port),
            "--section", encode(DashboardConfig()).decode(), *self.flags,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self._serves, f"the dashboard, see {self.log}")

    def stop(self) -> None:
        """End it."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def _serves(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        found = re.search(r" at http://127\.0\.0\.1:(\d+)/", self.log.read_text())
        if found is not None:
            self.port = int(found[1])
        return found is not None


@contextmanager
def dashboard_process(run: Path, job: str, urls: Sequence[str], log: Path, *flags: str) -> Iterator[DashboardProcess]:
    """Run the dashboard of a job during the block."""
    dashboard = DashboardProcess(run, job, urls, log, flags)
    try:
        dashboard.start()
        yield dashboard
    finally:
        dashboard.stop()
