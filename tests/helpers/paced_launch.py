"""`megatrain launch --standalone` with steps of a given length, as a process that leaves nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.helpers.forked_launch import forked_launch
from tests.helpers.forked_program import ForkedProgram
from tests.helpers.paced_train import PaceDirectory
from tests.helpers.processes import descendants
from tests.helpers.train_process import TrainJob


@contextmanager
def paced_launch(job: TrainJob, pace: PaceDirectory, num_ranks: int, log_file: Path) -> Iterator[ForkedProgram]:
    """Launch a job on this machine; its output goes to `log_file`. Remaining processes are killed at the end."""
    arguments = ["--standalone", f"--nproc-per-node={num_ranks}", "-m", "tests.helpers.paced_train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **pace.environment}
    with log_file.open("wb") as log, forked_launch([*arguments, str(job.config_file)], environment, log) as launch:
        try:
            yield launch
        finally:
            for pid in [*descendants(launch.pid), launch.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            launch.wait()
