"""Sends a request to the driver, waits for the answer as the options require, and prints it; progress to stderr."""

from __future__ import annotations

import argparse
import math
import time
from contextlib import closing

from megatrain.commands.argument_types import add_json
from megatrain.commands.printing import print_json, print_lines, print_note
from megatrain.contracts.exit_codes import GOOD_ENDS, ExitCode
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.job_requests import Answer, JobRequest, RequestKind
from megatrain.contracts.records.rounds import JobEnd
from megatrain_job.commands.job_location import OpenJob
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.jobs.send_request import UNREACHABLE_S, EtcdUnreachable, RefusedError, checked, request_events


def wait_for_answer(
    client: EtcdClient,
    keys: JobKeys,
    request: JobRequest,
    *,
    timeout_s: float,
    is_waiting: bool = True,
    unreachable_s: float = UNREACHABLE_S,
) -> Answer:
    """Send a request and return the driver's last answer; with `is_waiting` off, its first.

    Earlier answers go to stderr. The job's end with a good exit code also counts as the answer to a stop.
    Raises: RefusedError with the driver's reason, or if the job has ended otherwise; CoordinationError.
    """
    answer: Answer | None = None
    with closing(request_events(client, keys, request, timeout_s=timeout_s, unreachable_s=unreachable_s)) as events:
        for event in events:
            if isinstance(event, Answer):
                answer = checked(event)
                if event.is_done or not is_waiting:
                    return event
                print_note(event.text)
            elif isinstance(event, JobEnd):
                text = f"the job has ended with exit code {event.exit_code}: {event.reason}"
                if request.kind is not RequestKind.STOP or event.exit_code not in GOOD_ENDS:
                    raise RefusedError(text)
                return Answer(request.request_id, True, True, text, event.created_unix_s)
            elif isinstance(event, EtcdUnreachable):
                if request.kind is RequestKind.STOP and answer is not None:
                    text = f"{answer.text}; since then the job's etcd does not answer, as after the end of a job"
                    return Answer(request.request_id, True, True, text, time.time())
                print_note(f"etcd does not answer, still waiting: {event.reason}")
    raise AssertionError("request_events ends by raising")


def ask_driver(job: OpenJob, request: JobRequest, args: argparse.Namespace) -> int:
    """Send a request, wait as `add_waiting` declares, print the answer, and return the exit code.

    Raises: RefusedError with the driver's reason; CoordinationError.
    """
    answer = wait_for_answer(job.client, job.keys, request, timeout_s=args.timeout_s, is_waiting=args.is_waiting)
    if args.is_json:
        print_json({
            "job": job.keys.job, "request_id": request.request_id, "kind": str(request.kind), "host": request.host,
            "verdict": request.verdict, "is_accepted": answer.is_accepted, "is_done": answer.is_done,
            "text": answer.text,
        })  # fmt: skip
    else:
        print_lines([f"{job.keys.job}: {answer.text or ('done' if answer.is_done else 'accepted')}"])
    return int(ExitCode.OK)


DEFAULT_TIMEOUT_S = 900.0


def add_waiting(parser: argparse.ArgumentParser) -> None:
    """Declare --timeout, --no-wait and --json."""
    parser.add_argument("--timeout", dest="timeout_s", type=_seconds, default=DEFAULT_TIMEOUT_S, metavar="SECONDS",
                        help="how long to wait until the request is done (default %(default)g)")  # fmt: skip
    parser.add_argument("--no-wait", dest="is_waiting", action="store_false",
                        help="return as soon as the driver has accepted the request")  # fmt: skip
    add_json(parser)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < 10**7:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds above 0")
    return seconds
