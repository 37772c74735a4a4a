"""`megatrain driver JOB`: runs another candidate for the job's driver, without workers."""

from __future__ import annotations

import argparse
import os

from megatrain.commands.printing import print_note
from megatrain.programs.stop_signals import stopped_by_signals
from megatrain_job.commands.job_location import add_job, opened_job
from megatrain_launcher.launch.flags import PLATFORMS
from megatrain_launcher.logs.program_log import log_to_stderr

SUMMARY = "run a candidate for a job's driver on a machine that does not train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument(
        "--platform",
        choices=PLATFORMS,
        default="auto",
        help="which scheduler to inform of evicted hosts (default: the scheduler that the environment shows)",
    )


def run(args: argparse.Namespace) -> int:
    from megatrain_launcher.launch.dedicated_driver import run_dedicated_driver
    from megatrain_launcher.launch.plan import choose_platform

    log_to_stderr()
    stop = stopped_by_signals()
    with opened_job(args, is_patient=True) as job:
        code = run_dedicated_driver(job.client, job.keys, stop, print_note, choose_platform(args.platform, os.environ))
    return 0 if code is None else code
