"""`python -m megatrain_diagnostics.dashboard`: the dashboard of a running job. A launch starts it.

The settings come from the command line, else from the job's record. The defaults apply where there is no record or it
cannot be read.
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
from megatrain_diagnostics.dashboard.arguments import add_dashboard_arguments, given_settings
from megatrain_diagnostics.dashboard.command import ended
from megatrain_diagnostics.dashboard.program import checked_settings, serve_live

_logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the dashboard that the command line describes, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatrain_diagnostics.dashboard", allow_abbrev=False)
    parser.add_argument("--run", required=True, type=utf8_path, metavar="DIR", help="the run directory")
    parser.add_argument("--job", required=True, type=utf8_text, metavar="NAME")
    parser.add_argument(
        "--section",
        default="",
        metavar="JSON",
        help="section [dashboard] of the configuration (default: as in the job's record)",
    )
    add_etcd_arguments(parser)
    add_dashboard_arguments(parser)
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    stop = stopped_by_signals()
    try:
        keys = JobKeys(args.job)
        with EtcdClient(etcd_flags(args).settings(os.environ)) as client:
            section = decode(DashboardConfig, args.section, "--section") if args.section else _section(client, keys)
            settings = checked_settings(section, given_settings(args))
            return ended(serve_live(client, keys, RunDirectory(args.run), settings, stop, _logger.info))
    except MegatrainError as error:
        print(f"megatrain dashboard: {error}", file=sys.stderr)
        return error.exit_code


def _section(client: EtcdClient, keys: JobKeys) -> DashboardConfig:
    """Return the section of the job's record; where it cannot be read, the defaults, which are the most restrictive."""
    try:
        item = client.get(keys.record)
        record = None if item is None else decode(JobRecord, item.value, keys.record)
        # a job that torchrun started has no configuration
        return config_of_values(record.config, record.job).dashboard if record and record.config else DashboardConfig()
    except (CoordinationError, ConfigError) as error:
        _logger.warning("the job's configuration cannot be read, the dashboard uses default settings: %s", error)
        return DashboardConfig()


if __name__ == "__main__":
    keep_own_log()
    sys.exit(main())
