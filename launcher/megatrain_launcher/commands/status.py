"""`megatrain status [JOB]`: is the job healthy; if not what, where and since when; and what did the system do."""

from __future__ import annotations

import argparse
import time

from megatrain.commands.job_place import add_job, opened_job
from megatrain.commands.printing import print_json, print_lines
from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.jobs.assessment import assess
from megatrain.jobs.documents import status_document
from megatrain.jobs.snapshot import JobSnapshot, read_job
from megatrain_launcher.commands.live_view import LiveView
from megatrain_launcher.commands.status_text import status_lines

SUMMARY = "is a job healthy, and if not, what is wrong and what is done about it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    add_job(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", dest="is_json", help="print one JSON object")
    form.add_argument("--watch", action="store_true", dest="is_watching",
                      help="draw anew when something changes, until the job is over")  # fmt: skip
    parser.add_argument("--all", action="store_true", dest="is_all", help="every host, however many")


def run(args: argparse.Namespace) -> int:
    """Print how the job is. The exit code says only whether there was an answer.

    Raises: PlaceError, CoordinationError.
    """
    with opened_job(args) as job:
        if args.is_watching:
            LiveView(job.client, job.keys, is_all=args.is_all).run()
            return int(ExitCode.OK)
        snapshot = known(read_job(job.client, job.keys))
    now_s = time.time()
    answer = assess(snapshot, now_s)
    if args.is_json:
        print_json(status_document(snapshot, answer, now_s))
    else:
        print_lines(status_lines(snapshot, answer, now_s, is_all=args.is_all))
    return int(ExitCode.OK)


def known(snapshot: JobSnapshot) -> JobSnapshot:
    """Return the snapshot of a job that is there. Raises: CoordinationError."""
    if snapshot.exists:
        return snapshot
    raise CoordinationError(f"job {snapshot.job!r}: etcd knows no job of this name; `megatrain launch` starts one")
