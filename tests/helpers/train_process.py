"""`megatrain train` as its users start it: separate processes, and the files that a run leaves in a directory.

A test of the start of a process starts a new one; other tests use a fork, which need not import torch first.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.config.config import Config
from megatrain.config.serialize import to_toml
from megatrain.run_files.run_directory import RunDirectory, own_box_paths
from tests.helpers.forked_program import ForkedProgram, forked_program
from tests.helpers.permissions import heed_permissions
from tests.helpers.processes import descendants
from tests.helpers.source_tree import ROOT
from tests.helpers.training_case import make_config
from tests.helpers.waiting import DEADLINE_S


@dataclass(frozen=True, slots=True)
class TrainJob:
    """A configuration in a separate directory, and the results of its runs there."""

    root: Path
    config: Config

    @property
    def files(self) -> RunDirectory:
        return RunDirectory(Path(self.config.job.run_directory))

    @property
    def boxes(self) -> list[Path]:
        return own_box_paths(self.root / "boxes")

    @property
    def config_file(self) -> Path:
        return self.root / "config.toml"

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of one kind of metrics.jsonl; none before the file exists."""
        path = self.files.metrics / "metrics.jsonl"
        if not path.exists():
            return []
        # the last line may be half written
        lines = path.read_text().rpartition("\n")[0].splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]


def make_job(root: Path, *changes: Mapping[str, Mapping[str, Any]]) -> TrainJob:
    """Write the configuration of a job into `root`; its run directory is there too, unless `changes` set another
    one."""
    (root / "boxes").mkdir(parents=True)
    files: dict[str, dict[str, Any]] = {
        "job": {"run_directory": str(root / "run")},
        "telemetry": {"black_box_directory": str(root / "boxes")},
    }
    job = TrainJob(root, make_config(files, *changes))
    job.config_file.write_text(to_toml(job.config))
    return job


TrainProcess = subprocess.Popen[str] | ForkedProgram


@contextmanager
def started(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, *, output: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start `python -m ARGUMENTS`; at the end all of its processes are dead.

    output: a file for stdout and stderr, in place of pipes. Permissions hold even if root runs the tests.
    """
    file = output.open("ab") if output is not None else None
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=_environment(environment),
        stdout=subprocess.PIPE if file is None else file,
        stderr=subprocess.PIPE if file is None else subprocess.STDOUT,
        text=True,
        preexec_fn=heed_permissions,
    )
    try:
        yield process
    finally:
        _end(process)
        process.communicate()
        if file is not None:
            file.close()


@contextmanager
def forked(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    output: Path | None = None,
    prepare: Sequence[Callable[[], object]] = (),
) -> Iterator[ForkedProgram]:
    """Do as `started` does, with a process that has torch from the start. prepare: functions that it calls first."""
    with ExitStack() as stack:
        program = forked_program(
            ["-m", *arguments],
            environment=_environment(environment),
            output=stack.enter_context(output.open("ab")) if output is not None else None,
            prepare=(*prepare, heed_permissions),
        )
        process = stack.enter_context(program)
        stack.callback(_end, process)
        yield process


def _environment(changes: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **(changes or {})}


def _end(process: TrainProcess) -> None:
    # torchrun starts each worker in a separate session, so no process group contains all of them.
    for pid in [process.pid, *descendants(process.pid)] if process.poll() is None else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def finish(process: TrainProcess) -> tuple[int, str, str]:
    """Wait for the end and return exit code, stdout and stderr."""
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    return process.returncode, stdout, stderr
