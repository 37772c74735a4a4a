"""Sends metrics to Weights & Biases: the values of `curves`, such as step/loss, over the step.

A run directory is one W&B run, even if the job starts several times: a file beside the metrics has the run's id.
Without a network or a login the metrics are stored on disk, and `wandb sync` sends them later. If the files of a run
are removed, the sink continues the same run in new files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import wandb

from megatrain.config.config import Config
from megatrain.contracts.files.vanished_files import WatchedPath
from megatrain.reporting.report import Report, curves

RUN_ID_FILE = "wandb-run-id"
_INIT_TIMEOUT_S = 30


class WandbSink:
    """Logs to the W&B run of `directory`."""

    def __init__(self, config: Config, directory: Path, print_line: Callable[[str], None]) -> None:
        self.name = "Weights & Biases"
        self._config, self._directory, self._print_line = config, directory, print_line
        self._files = WatchedPath(directory / "wandb")
        id_path = directory / RUN_ID_FILE
        self._open(id_path.read_text().strip() if id_path.exists() else None)

    def _open(self, run_id: str | None) -> None:
        settings: dict[str, Any] = {
            "project": self._config.log.wandb_project,
            "name": self._config.job.name,
            "dir": str(self._directory),
            "config": self._config.to_dict(),
            "id": run_id,
            "resume": "allow",
            # The timeout is short because other ranks wait for this rank. console="off" because W&B's capture of the
            # console would disturb the progress line.
            "settings": wandb.Settings(init_timeout=_INIT_TIMEOUT_S, console="off", quiet=True),
        }
        try:
            self._run = wandb.init(**settings)
        except wandb.Error as error:
            location = f"{self._files.path} for `wandb sync`"
            self._print_line(f"Weights & Biases cannot be reached ({error}); metrics are kept in {location}")
            self._run = wandb.init(mode="offline", **settings)
        (self._directory / RUN_ID_FILE).write_text(f"{self._run.id}\n")
        self._files.was_lost()  # from now on, the current files are watched
        # W&B's own step can only grow, but a resumed run goes back to the step of its checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, report: Report) -> None:
        """Log the values of a report."""
        if self._files.was_lost():
            self._open_again(report.step)
        try:
            self._run.log({"step": report.step, **curves(report)})
        except wandb.Error as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Send buffered values and finish the run."""
        self._files.close()
        self._run.finish()

    def _open_again(self, step: int) -> None:
        """Continue the same run in new files after the old ones were removed. Raises: OSError."""
        lost = f"values before step {step} that were not sent are lost"
        self._print_line(f"metrics: {self._files.path} was removed from outside; {lost}")
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            self._run.finish()
            self._open(self._run.id)
        except wandb.Error as error:
            raise OSError(str(error)) from error
