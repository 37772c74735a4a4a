"""The daemon's job and address; cheap to import, for the command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from megatrain.commands.argument_types import utf8_text, whole_number
from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain_job.coordination.settings import EtcdSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """The settings that a daemon starts with."""

    run: Path
    job: str
    etcd: EtcdSettings
    address: str = ""
    """Empty: [diagnostics] daemon_address, else loopback or this machine's address on the way to etcd."""
    port: int | None = None
    """None: [diagnostics] daemon_port."""
    section: DiagnosticsConfig | None = None
    """[diagnostics] as the launch has it. None: as in the job's record, for which the daemon waits."""
    checkpoints: Path | None = None
    """Where the job's checkpoints are, if not in the run directory."""


def add_daemon_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where the daemon listens."""
    parser.add_argument(
        "--address", default="", type=utf8_text, help="address to listen at (default: diagnostics.daemon_address)"
    )
    parser.add_argument(
        "--port",
        default=None,
        type=whole_number(0, 65535),
        help="port to listen at, 0 for any (default: diagnostics.daemon_port)",
    )
