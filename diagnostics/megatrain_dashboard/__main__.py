"""`python -m megatrain_dashboard`: the dashboard of a running job. A launch starts it.

All settings come from the command line, so the access rules are known before the server listens.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from megatrain.commands.argument_types import utf8_path, utf8_text
from megatrain.config.dashboard import DashboardConfig
from megatrain.contracts.errors import MegatrainError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode
from megatrain.programs.own_output import keep_own_log
from megatrain.programs.stop_signals import stopped_by_signals
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.arguments import add_dashboard_arguments, given_settings
from megatrain_dashboard.command import finish_serving
from megatrain_dashboard.program import checked_settings, serve_live
from megatrain_job.commands.etcd_flags import add_etcd_arguments, etcd_flags
from megatrain_job.coordination.client import EtcdClient

_logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the dashboard that the command line describes, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatrain_dashboard", allow_abbrev=False)
    parser.add_argument("--run", required=True, type=utf8_path, metavar="DIR", help="the run directory")
    parser.add_argument("--job", required=True, type=utf8_text, metavar="NAME")
    parser.add_argument(
        "--section", required=True, metavar="JSON", help="section [dashboard] of the job's configuration"
    )
    add_etcd_arguments(parser)
    add_dashboard_arguments(parser)
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    stop = stopped_by_signals()
    try:
        keys = JobKeys(args.job)
        with EtcdClient(etcd_flags(args).settings(os.environ)) as client:
            section = decode(DashboardConfig, args.section, "--section")
            settings = checked_settings(section, given_settings(args))
            return finish_serving(serve_live(client, keys, RunDirectory(args.run), settings, stop, _logger.info))
    except MegatrainError as error:
        print(f"megatrain dashboard: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    keep_own_log()
    sys.exit(main())
