"""The diagnostics daemon as a separate process, which a test may kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.contracts.records.diag_records import DaemonRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode, encode
from megatrain.programs.processes import install_parent_death_guard
from megatrain_job.coordination.client import EtcdClient
from tests.helpers.waiting import DEADLINE_S

KEYS = JobKeys("demo")


class DaemonProcess:
    """One process of the daemon of job `demo`; all successive daemons share its log."""

    def __init__(self, run: Path, endpoints: list[str]) -> None:
        run.mkdir(exist_ok=True)
        self._log = run / "daemon.log"
        command = [sys.executable, "-m", "megatrain_diagnostics.daemon", "--run", str(run), "--job", KEYS.job]
        command += ["--rdzv-endpoint", ",".join(endpoints), "--address", "127.0.0.1", "--port", "0"]
        command += ["--section", encode(DiagnosticsConfig()).decode()]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stderr=log, preexec_fn=partial(install_parent_death_guard, os.getpid())
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Request its end and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


@contextmanager
def running_daemon(run: Path, endpoints: list[str]) -> Iterator[DaemonProcess]:
    """Run a daemon during the block; none is left after it."""
    one = DaemonProcess(run, endpoints)
    try:
        yield one
    finally:
        one.kill()


def daemon_record(client: EtcdClient, keys: JobKeys = KEYS) -> DaemonRecord | None:
    """Return the daemon's record in etcd."""
    item = client.get(keys.daemon)
    return None if item is None else decode(DaemonRecord, item.value, keys.daemon)
