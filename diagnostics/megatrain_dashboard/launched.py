"""The command that a launch runs for the web page of a job, found by the entry point `megatrain.job_programs`.

This module loads nothing else of the dashboard: executors import it, and do not need the rest. Without the packages of
the extra `diagnostics` there is no command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatrain.config.config import Config
from megatrain.contracts.records.record import encode
from megatrain.programs.installed_packages import are_installed

_PACKAGES = ("pyarrow", "duckdb", "fastapi", "uvicorn")


def job_commands(*, config: Config, run: Path, etcd: Sequence[str]) -> dict[str, list[str]]:
    """Return the command of the web page by its name; none where no events are stored, or the page is not configured.

    `etcd`: flags that give etcd's endpoints.
    """
    if not config.diagnostics.is_streamed or not config.dashboard.is_served or not are_installed(_PACKAGES):
        return {}
    place = ["--run", str(run), "--job", config.job.name, *etcd]
    section = ["--section", encode(config.dashboard).decode()]
    return {"dashboard": [sys.executable, "-m", "megatrain_dashboard", *place, *section]}
