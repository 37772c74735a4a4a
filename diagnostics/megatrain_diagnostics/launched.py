"""The commands of the programs that a launch starts for diagnostics: a daemon per job, and a streamer per host.

They are found by the entry points `megatrain.job_programs` and `megatrain.host_program`. This module imports little,
because executors import it. Without the packages of the extra `diagnostics` there is no command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatrain.config.config import Config
from megatrain.contracts.records.record import encode
from megatrain.programs.installed_packages import are_installed
from megatrain_diagnostics.streamer.settings import StreamerSettings

_DAEMON_PACKAGES = ("pyarrow", "duckdb")
_STREAMER_PACKAGES = ("pyarrow", "prometheus_client")


def job_commands(*, config: Config, run: Path, etcd: Sequence[str]) -> dict[str, list[str]]:
    """Return program name -> command of the daemon; empty if streaming is off, or packages are missing.

    `etcd`: flags that give etcd's endpoints.
    """
    if not config.diagnostics.is_streamed or not are_installed(_DAEMON_PACKAGES):
        return {}
    place = ["--run", str(run), "--job", config.job.name, *etcd]
    section = ["--section", encode(config.diagnostics).decode()]
    directory = config.checkpoint.directory
    saved = ["--checkpoints", directory] if directory else []
    return {"diagnostics": [sys.executable, "-m", "megatrain_diagnostics.daemon", *place, *section, *saved]}


def streamer_command(*, config: Config, run: Path, host: str, logs: Path, etcd: Sequence[str]) -> list[str]:
    """Return the command of a host's streamer; empty if streaming is off, or packages are missing.

    `logs`: the directory with the logs of this host's ranks; `etcd`: flags that give etcd's endpoints.
    """
    if not config.diagnostics.is_streamed or not are_installed(_STREAMER_PACKAGES):
        return []
    settings = StreamerSettings(
        job=config.job.name,
        host=host,
        run=str(run.absolute()),
        host_logs=str(logs.absolute()),
        black_box_directory=config.telemetry.black_box_directory,
        spool_bytes=config.diagnostics.spool_mb * 1_000_000,
        phase_timeouts=config.phase_timeouts,
        metrics_address=config.diagnostics.metrics_address,
        metrics_port=config.diagnostics.metrics_port,
        metrics_token_file=config.diagnostics.metrics_token_file,
        telemetry_interval_s=config.diagnostics.telemetry_interval_s,
        dcgm_url=config.diagnostics.dcgm_url,
    )
    return [sys.executable, "-m", "megatrain_diagnostics.streamer", "--settings", encode(settings).decode(), *etcd]
