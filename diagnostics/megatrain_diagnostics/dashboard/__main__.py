"""`python -m megatrain_diagnostics.dashboard`: the dashboard as a launch starts it, for a running job.

The page's settings are those of its command line, else those of the job's record; where there is none, or it cannot be
read it, the usual ones.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from megatrain.commands.argument_types import utf8_path, utf8_text
from megatrain.commands.etcd_flags import add_etcd_arguments, etcd_flags
from megatrain.config.dashboard import DashboardConfig
from megatrain.config.serialize import config_of_values
from megatrain.contracts.errors import ConfigError, CoordinationError, MegatrainError
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.record import decode
from megatrain.contracts.rounds import JobRecord
from megatrain.contracts.run_directory import RunDirectory
from megatrain.coordination.client import EtcdClient
from megatrain.programs.own_output import keep_own_log
from megatrain.programs.stop_signals import stopped_by_signals
from megatrain_diagnostics.dashboard.arguments import add_dashboard_arguments, said_settings
from megatrain_diagnostics.dashboard.command import ended
from megatrain_diagnostics.dashboard.program import checked_settings, serve_live

_logger = logging.getLogger(__name__)


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatrain_diagnostics.dashboard", allow_abbrev=False)
    parser.add_argument("--run", required=True, type=utf8_path, metavar="DIR", help="the run directory")
    parser.add_argument("--job", required=True, type=utf8_text, metavar="NAME")
    parser.add_argument(
        "--section",
        default="",
        metavar="JSON",
        help="[dashboard] of the configuration (default: as the job's record says)",
    )
    add_etcd_arguments(parser)
    add_dashboard_arguments(parser)
    args = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    stop = stopped_by_signals()
    try:
        keys = JobKeys(args.job)
        with EtcdClient(etcd_flags(args).settings(os.environ)) as client:
            section = decode(DashboardConfig, args.section, "--section") if args.section else _section(client, keys)
            settings = checked_settings(section, said_settings(args))
            return ended(serve_live(client, keys, RunDirectory(args.run), settings, stop, _logger.info))
    except MegatrainError as error:
        print(f"megatrain dashboard: {error}", file=sys.stderr)
        return error.exit_code


def _section(client: EtcdClient, keys: JobKeys) -> DashboardConfig:
    """Return the section of the job's record; the usual one, which is the most careful, where it cannot be read."""
    try:
        item = client.get(keys.record)
        record = None if item is None else decode(JobRecord, item.value, keys.record)
        # a job that torchrun started has no configuration
        return config_of_values(record.config, record.job).dashboard if record and record.config else DashboardConfig()
    except (CoordinationError, ConfigError) as error:
        _logger.warning("the job's configuration is not known, the page has its usual settings: %s", error)
        return DashboardConfig()


if __name__ == "__main__":
    keep_own_log()
    sys.exit(main())
