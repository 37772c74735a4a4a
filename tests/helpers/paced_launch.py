"""`megatrain launch --standalone` with steps of a stated length, as a process that leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.helpers.paced_train import PaceDirectory
from tests.helpers.processes import descendants
from tests.helpers.source_tree import ROOT
from tests.helpers.train_process import Job


@contextmanager
def paced_launch(job: Job, pace: PaceDirectory, num_ranks: int, log_file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Launch a job on this machine; its output goes to `log_file`. What is left of it afterwards is killed."""
    arguments = ["-m", "megatrain", "launch", "--standalone", f"--nproc-per-node={num_ranks}"]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments, "-m", "tests.helpers.paced_train", str(job.config_file)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **pace.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        for pid in [*descendants(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
