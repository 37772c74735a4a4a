"""Section [job]: what the run is called and where it writes."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """What the run is called and where it writes."""

    name: str = option(
        "megatrain", "Name of the run, in logs, metrics and incidents.", pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*"
    )
    run_directory: str = option(
        "", "Directory for everything the run writes: checkpoints, logs, metrics. Empty: runs/<job.name>."
    )

    @property
    def resolved_run_directory(self) -> str:
        return self.run_directory or f"runs/{self.name}"
