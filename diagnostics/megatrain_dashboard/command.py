"""`megatrain dashboard [JOB]`: serve the web page of all jobs, of one job, or with --replay DIR of a recorded run."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.commands.argument_types import utf8_path, utf8_text
from megatrain.commands.printing import print_note
from megatrain.config.dashboard import DashboardConfig
from megatrain.config.serialize import config_of_values
from megatrain.contracts.errors import ConfigError, DataError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import JobRecord
from megatrain.programs.stop_signals import stopped_by_signals
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.commands.etcd_flags import EtcdFlags, etcd_flags
from megatrain_job.commands.job_location import (
    RUNS,
    JobLocationError,
    MissingJobLocationError,
    add_job,
    named_job,
    opened_job,
    run_at,
)

if TYPE_CHECKING:
    from megatrain_job.commands.job_location import OpenJob
    from megatrain_job.coordination.settings import EtcdSettings

SUMMARY = "show all jobs in the browser, or one job: a running one, or with --replay the history of a run"
_JOB_HELP = "a run directory or a job's name (default: all jobs)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    from megatrain_dashboard.arguments import add_dashboard_arguments

    add_job(parser, job_help=_JOB_HELP)
    parser.add_argument("--runs", type=utf8_path, default=None, metavar="DIR",
                        help="list the jobs whose run directories lie in DIR (default: runs/, and the jobs of the etcd "
                             "of --rdzv-endpoint if it is given)")  # fmt: skip
    parser.add_argument("--replay", default="", type=utf8_text, metavar="DIR",
                        help="a run directory, or the name of a run below runs/: show its recorded history, "
                             "without its etcd")  # fmt: skip
    parser.add_argument("--run", type=utf8_path, default=None, metavar="DIR",
                        help="path of the run directory on this machine (default: as in the job's record)")  # fmt: skip
    add_dashboard_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives. Raises: JobLocationError, ConfigError, CoordinationError, DataError."""
    try:
        # imported late, so that --help does not wait for it
        from megatrain_dashboard import program
    except ModuleNotFoundError as error:
        reason = f"the dashboard needs {error.name}, which is not installed"
        raise DataError(f"{reason}: pip install 'megatrain[diagnostics]'") from error
    from megatrain_dashboard.arguments import given_settings

    given = given_settings(args)
    stop = stopped_by_signals()
    if not args.replay and not named_job(args):
        runs, etcd = _all_jobs(args)
        settings = program.checked_settings(DashboardConfig(), given)
        return finish_serving(program.serve_jobs(runs, etcd, settings, stop, print_note))
    if args.runs is not None:
        raise JobLocationError(
            f"--runs={args.runs} lists all jobs, but another argument names one; leave one of them out"
        )
    if args.replay:
        if named_job(args):
            raise JobLocationError(
                f"--replay={args.replay} shows a recorded run, JOB shows a running job; give only one of them"
            )
        found = run_at(args.replay)
        if found is None:
            raise MissingJobLocationError(
                f"--replay={args.replay}: no such directory; name a run directory such as runs/demo"
            )
        settings = program.checked_settings(DashboardConfig(), given)
        has_ended = program.serve_recorded(RunDirectory(found), settings, stop, print_note)
    else:
        with opened_job(args, is_patient=True) as job:
            directory, section = _recorded_run_and_section(job, args.run)
            settings = program.checked_settings(section, given)
            # the launch's own page stays announced, because it outlives this one
            is_announced = job.client.get(job.keys.dashboard) is None
            has_ended = program.serve_live(
                job.client, job.keys, RunDirectory(directory), settings, stop, print_note, is_announced=is_announced
            )
    return finish_serving(has_ended)


def _all_jobs(args: argparse.Namespace) -> tuple[Path | None, EtcdSettings | None]:
    """Return the directory of runs and the etcd whose jobs are listed; None where there is none.

    Raises: JobLocationError.
    """
    try:
        flags = etcd_flags(args)
        etcd = flags.settings(os.environ) if flags.endpoints else None
    except ConfigError as error:
        raise JobLocationError("; ".join(error.problems)) from error
    if etcd is None and flags != EtcdFlags():
        raise JobLocationError(
            "--etcd-* and --rdzv-conf belong to the etcd of --rdzv-endpoint: give that option too, or none of them"
        )
    if args.run is not None:
        raise JobLocationError(
            f"--run={args.run} is the directory of one job: name the job too, or use --runs for all jobs"
        )
    runs: Path | None = args.runs or RUNS
    if runs is not None and not runs.is_dir():
        if args.runs is not None or etcd is None:
            raise MissingJobLocationError(f"{runs}: no such directory of runs; name it with --runs DIR")
        runs = None
    return runs, etcd


def finish_serving(has_ended: bool) -> int:
    """Return the exit code after serving. `has_ended`: whether every thread has ended; if not, the process exits here.

    A thread that still computes a response would delay the normal end of the process.
    """
    if not has_ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ExitCode.OK)
    return int(ExitCode.OK)


def _recorded_run_and_section(job: OpenJob, named: Path | None) -> tuple[Path, DashboardConfig]:
    """Return the run directory and the section of a job. Raises: JobLocationError, ConfigError, CoordinationError."""
    item = job.client.get(job.keys.record)
    if item is None:
        raise MissingJobLocationError(
            f"etcd has no job {job.keys.job!r}; `megatrain dashboard --replay DIR` shows a job that has ended"
        )
    record = decode(JobRecord, item.value, job.keys.record)
    directory = named or job.run_directory or Path(record.run_directory)
    if not directory.is_dir():
        raise MissingJobLocationError(
            f"{directory}: no such run directory on this machine; name its path here with --run DIR"
        )
    # a job that torchrun started has no configuration
    return directory, config_of_values(record.config, record.job).dashboard if record.config else DashboardConfig()
