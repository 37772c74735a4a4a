"""Whose daemon it is and where it listens; light to import, for the command line's sake."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from megatrain.commands.argument_types import utf8_text, whole_number
from megatrain.coordination.settings import EtcdSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """What a daemon is started with."""

    run: Path
    job: str
    etcd: EtcdSettings
    address: str = ""
    """Empty: as [diagnostics] daemon_address says, or by where etcd is."""
    port: int | None = None
    """None: as [diagnostics] daemon_port says."""


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
