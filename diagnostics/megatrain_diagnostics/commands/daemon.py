"""`megatrain diag daemon`: run the diagnostics daemon on this host, for a job that was launched without one."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain.commands.argument_types import utf8_path
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import JobRecord
from megatrain_diagnostics.collector.settings import DaemonSettings, add_daemon_arguments
from megatrain_job.commands.job_location import MissingJobLocationError, add_job, opened_job
from megatrain_job.coordination.settings import EtcdSettings


def add_verb(verbs: Any) -> None:
    parser = verbs.add_parser("daemon", help="run the diagnostics daemon of a running job", allow_abbrev=False)
    add_job(parser)
    parser.add_argument("--run", type=utf8_path, default=None, metavar="DIR",
                        help="path of the run directory on this machine (default: as in the job's record)")  # fmt: skip
    add_daemon_arguments(parser)
    parser.set_defaults(run_verb=run)


def run(args: argparse.Namespace) -> int:
    """Run the daemon until a signal arrives. Raises: MegatrainError."""
    # loading the daemon is slow, and no other command needs it
    from megatrain_diagnostics.daemon import serve

    with opened_job(args) as job:
        directory = args.run or job.run_directory
        if directory is None:
            item = job.client.get(job.keys.record)
            if item is None:
                raise MissingJobLocationError(
                    f"job {job.keys.job!r} has no record in etcd; name its run directory with --run DIR"
                )
            directory = Path(decode(JobRecord, item.value, job.keys.record).run_directory)
        # a daemon runs long and needs the default time limits, not the short ones of a command
        patient = EtcdSettings(job.client.settings.endpoints)
        etcd = replace(job.client.settings, attempt_s=patient.attempt_s, call_s=patient.call_s)
    if not directory.is_dir():
        raise MissingJobLocationError(
            f"{directory}: no such run directory on this machine; name its path here with --run DIR"
        )
    settings = DaemonSettings(
        run=directory,
        job=job.keys.job,
        etcd=etcd,
        address=args.address,
        port=args.port,
    )
    return serve(settings)
