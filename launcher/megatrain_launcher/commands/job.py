"""`megatrain job checkpoint|restart|stop|approve|dismiss`: send a request to the driver of a running job."""

from __future__ import annotations

import argparse

from megatrain.commands.argument_types import Verbs, utf8_text
from megatrain.contracts.errors import UsageError
from megatrain.contracts.records.job_requests import RequestKind
from megatrain_job.commands.job_location import add_job, opened_job
from megatrain_job.jobs.send_request import check_accepts_requests, make_request
from megatrain_job.jobs.snapshot import read_job
from megatrain_launcher.commands.wait_for_answer import add_waiting, ask_driver

SUMMARY = "restart, stop or checkpoint a running job; approve or dismiss what the diagnosis proposes"


_VERBS = (
    (RequestKind.CHECKPOINT, "save a checkpoint at the next step that all ranks agree on"),
    (RequestKind.RESTART, "end the round and start the workers again from the newest state"),
    (RequestKind.STOP, "save a checkpoint, then end the job"),
)
_VERDICT_VERBS = (
    (RequestKind.APPROVE, 'carry out a verdict that waits for a person (diagnostics.eviction = "approval")'),
    (RequestKind.DISMISS, "decline a verdict that waits for a person"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands and their options."""
    verbs: Verbs = parser.add_subparsers(dest="job_verb", required=True, metavar="SUBCOMMAND")
    for kind, text in _VERBS:
        verb = verbs.add_parser(str(kind), help=text, description=text, allow_abbrev=False)
        add_job(verb)
        _add_rest(verb, kind)
    for kind, text in _VERDICT_VERBS:
        verb = verbs.add_parser(str(kind), help=text, description=text, allow_abbrev=False)
        add_job(verb)
        verb.add_argument(
            "--verdict",
            default="",
            type=utf8_text,
            metavar="ID",
            help="the verdict's id, which `megatrain status` shows",
        )
        _add_rest(verb, kind)


def _add_rest(verb: argparse.ArgumentParser, kind: RequestKind) -> None:
    verb.add_argument("--reason", default="", type=utf8_text, metavar="TEXT", help="the reason, for the records")
    add_waiting(verb)
    verb.set_defaults(kind=kind)


def run(args: argparse.Namespace) -> int:
    """Send the request, and wait until it is done.

    Raises: UsageError if a verdict's id is missing; RefusedError with the driver's reason; CoordinationError if no
    driver answers.
    """
    verdict = getattr(args, "verdict", None)
    if verdict == "":
        raise UsageError(f"no verdict is named; write megatrain job {args.kind} [JOB] --verdict ID")
    request = make_request(args.kind, reason=args.reason, verdict=verdict or "")
    with opened_job(args) as job:
        check_accepts_requests(read_job(job.client, job.keys))
        return ask_driver(job, request, args)
