"""The settings of the daemon; a small module, so that the command line can import it quickly."""

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
    """Empty: [diagnostics] daemon_address; if that is empty too, see `collector.configuration.usual_address`."""
    port: int | None = None
    """None: [diagnostics] daemon_port."""
    section: DiagnosticsConfig | None = None
    """[diagnostics] of the launch. None: the daemon waits for the job's record and uses its section."""
    checkpoints: Path | None = None
    """The directory of the job's checkpoints; None: in the run directory."""


def add_daemon_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options --address and --port."""
    parser.add_argument(
        "--address", default="", type=utf8_text, help="address to listen at (default: diagnostics.daemon_address)"
    )
    parser.add_argument(
        "--port",
        default=None,
        type=whole_number(0, 65535),
        help="port to listen at, 0 for any (default: diagnostics.daemon_port)",
    )
