"""Metrics to Weights & Biases: a value a field, named kind/field, over the step.

A run directory is one W&B run, however often the job is started: its id is kept beside the metrics. Without a network
or a login the run is kept on disk, and `wandb sync` sends it later.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import wandb

from megatrain.config.config import Config
from megatrain.reporting.report import Report

RUN_ID_FILE = "wandb-run-id"
_PATIENCE_S = 30


class WandbSink:
    """Logs to the one W&B run that belongs to `directory`."""

    def __init__(self, config: Config, directory: Path, note: Callable[[str], None]) -> None:
        self.name = "Weights & Biases"
        id_path = directory / RUN_ID_FILE
        settings: dict[str, Any] = {
            "project": config.log.wandb_project,
            "name": config.job.name,
            "dir": str(directory),
            "config": config.to_dict(),
            "id": id_path.read_text().strip() if id_path.exists() else None,
            "resume": "allow",
            # Other ranks wait for this one. The console is ours: W&B's copy of it would disturb the progress line.
            "settings": wandb.Settings(init_timeout=_PATIENCE_S, console="off", quiet=True),
        }
        try:
            self._run = wandb.init(**settings)
        except wandb.Error as error:
            note(
                f"Weights & Biases cannot be reached ({error}); metrics are kept in {directory}/wandb for `wandb sync`"
            )
            self._run = wandb.init(mode="offline", **settings)
        id_path.write_text(f"{self._run.id}\n")
        # W&B's own step only grows, but a resumed run goes back to the step of its checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, report: Report) -> None:
        """Log the values of a report."""
        values = {f"{report.kind}/{name}": value for name, value in report.values().items() if name != "step"}
        try:
            self._run.log({"step": report.step, **values})
        except wandb.Error as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Send what is held back and finish the run."""
        self._run.finish()
