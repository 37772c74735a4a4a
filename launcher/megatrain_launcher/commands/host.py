"""`megatrain host ls|check|cordon|uncordon|evict [JOB]`: the hosts of a job.

Cordons are written to etcd directly, even when nothing runs. `check` and `evict` are requests to the driver.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace

from megatrain.commands.argument_types import Verbs, add_json, utf8_text
from megatrain.commands.printing import print_json, print_lines, print_note
from megatrain.contracts.errors import CoordinationError, NotFoundError, UsageError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.natural_order import natural_order
from megatrain.contracts.records.host_records import CheckOutcome, CheckReport, CheckResult
from megatrain.contracts.records.job_requests import Answer, RequestKind
from megatrain.contracts.records.record import to_plain
from megatrain.contracts.records.rounds import JobEnd
from megatrain.formatting import age_text, names_text
from megatrain_job.commands.job_location import OpenJob, add_job, opened_job
from megatrain_job.jobs.cordons import cordon_host, uncordon_host
from megatrain_job.jobs.documents import check_document, host_document
from megatrain_job.jobs.host_view import host_views
from megatrain_job.jobs.send_request import (
    EtcdUnreachable,
    check_accepts_requests,
    checked,
    make_request,
    request_events,
    requester,
)
from megatrain_job.jobs.snapshot import JobSnapshot, read_job
from megatrain_launcher.commands.status import known
from megatrain_launcher.commands.status_text import check_lines, host_lines
from megatrain_launcher.commands.wait_for_answer import add_waiting, ask_driver

SUMMARY = "list the hosts of a job; check, cordon and evict them"

_OF_ONE_HOST = ("cordon", "uncordon", "evict")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands and their options."""
    verbs: Verbs = parser.add_subparsers(dest="host_verb", required=True, metavar="SUBCOMMAND")
    listing = verbs.add_parser("ls", help="list every host with its state and its problems", allow_abbrev=False)
    add_job(listing)
    add_json(listing)
    listing.set_defaults(run_verb=_ls)

    checking = verbs.add_parser("check", help="run the health checks of a host, or of all", allow_abbrev=False)
    _add_job_and_host(checking, "default: all hosts")
    add_waiting(checking)
    checking.set_defaults(run_verb=_check)

    for name, text, action in (
        ("cordon", "keep a host out of all later rounds", _cordon),
        ("uncordon", "allow a host in later rounds again", _uncordon),
        ("evict", "remove a host from the running round, and cordon it", _evict),
    ):
        verb = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        _add_job_and_host(verb, "name of the host")
        if name != "uncordon":
            verb.add_argument(
                "--reason", default="", type=utf8_text, metavar="TEXT", help="the reason, for the records"
            )
        if name == "evict":
            add_waiting(verb)
        else:
            add_json(verb)
        verb.set_defaults(run_verb=action)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand that was parsed; return the exit code.

    Raises: UsageError, JobLocationError, NotFoundError, CoordinationError, RefusedError.
    """
    if args.host_verb in _OF_ONE_HOST and not args.host:
        raise UsageError(f"no host is named; write megatrain host {args.host_verb} [JOB] --host HOST")
    with opened_job(args) as job:
        code: int = args.run_verb(job, args)
    return code


def _add_job_and_host(parser: argparse.ArgumentParser, text: str) -> None:
    add_job(parser)
    parser.add_argument("--host", type=_host_name, metavar="HOST", help=text)


def _host_name(text: str) -> str:
    if not text or "/" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a host's name; `megatrain host ls` lists them")
    return utf8_text(text)


def _ls(job: OpenJob, args: argparse.Namespace) -> int:
    snapshot = known(read_job(job.client, job.keys))
    views = host_views(snapshot)
    if args.is_json:
        print_json({"job": snapshot.job, "hosts": [host_document(view) for view in views]})
    else:
        print_lines(host_lines(views, time.time()) if views else [f"{snapshot.job}: no host is registered"])
    return int(ExitCode.OK)


def _cordon(job: OpenJob, args: argparse.Namespace) -> int:
    snapshot = read_job(job.client, job.keys)
    cordon, is_new = cordon_host(job.client, job.keys, args.host, reason=args.reason, by=requester())
    if args.is_json:
        print_json({"job": job.keys.job, "is_new": is_new, "cordon": to_plain(cordon)})
    elif is_new:
        print_lines([f"{args.host} is cordoned: no round of {job.keys.job} uses it from now on"])
    else:
        age = age_text(cordon.created_unix_s, time.time())
        print_lines([f"{args.host} was cordoned already, {age} ago by {cordon.by}: {cordon.reason}"])
    _print_membership(snapshot, args.host)
    return int(ExitCode.OK)


def _print_membership(snapshot: JobSnapshot, host: str) -> None:
    newest = snapshot.newest_round
    if newest is not None and snapshot.newest_halt is None and any(part.host == host for part in newest.hosts):
        print_note(
            f"note: {host} stays in round {newest.number} until that round is over; "
            f"`megatrain host evict --host {host}` removes it"
        )
    elif not snapshot.exists:
        print_note(f"note: etcd has no job {snapshot.job!r} yet")
    elif host not in snapshot.hosts:
        print_note(f"note: no host {host} is registered; there {_there(snapshot)}")


def _there(snapshot: JobSnapshot) -> str:
    names = sorted(snapshot.hosts, key=natural_order)
    return f"{'is' if len(names) == 1 else 'are'} {names_text(names)}" if names else "is none"


def _uncordon(job: OpenJob, args: argparse.Namespace) -> int:
    was_cordoned = uncordon_host(job.client, job.keys, args.host)
    if args.is_json:
        print_json({"job": job.keys.job, "host": args.host, "was_cordoned": was_cordoned})
    elif was_cordoned:
        print_lines([f"{args.host} is no longer cordoned: the next round of {job.keys.job} may use it"])
    else:
        print_lines([f"{args.host} was not cordoned"])
    return int(ExitCode.OK)


def _evict(job: OpenJob, args: argparse.Namespace) -> int:
    snapshot = read_job(job.client, job.keys)
    check_accepts_requests(snapshot)
    _check_is_there(snapshot, args.host)
    request = make_request(RequestKind.EVICT, host=args.host, reason=args.reason)
    return ask_driver(job, request, args)


def _check_is_there(snapshot: JobSnapshot, host: str) -> None:
    newest = snapshot.newest_round
    if host not in snapshot.hosts and (newest is None or all(part.host != host for part in newest.hosts)):
        raise NotFoundError(f"job {snapshot.job!r} has no host {host!r}; there {_there(snapshot)}")


def _check(job: OpenJob, args: argparse.Namespace) -> int:
    """Ask for health checks and print their findings; the exit code is 0 if all hosts are fit and all pairs passed."""
    snapshot = read_job(job.client, job.keys)
    check_accepts_requests(snapshot)
    if args.host and args.host not in snapshot.hosts:
        raise NotFoundError(f"job {snapshot.job!r} has no host {args.host!r}; there {_there(snapshot)}")
    request = make_request(RequestKind.CHECK, host=args.host or "")
    if not args.is_waiting:
        return ask_driver(job, request, args)
    expected = {args.host} if args.host else set(snapshot.hosts)
    reports: dict[str, CheckReport] = {}
    answer: Answer | None = None
    problem = ""
    try:
        with closing(request_events(job.client, job.keys, request, timeout_s=args.timeout_s)) as events:
            for event in events:
                if isinstance(event, CheckReport):
                    reports[event.host] = _joined(reports.get(event.host), event)
                elif isinstance(event, Answer):
                    answer = checked(event)
                elif isinstance(event, JobEnd):
                    problem = f"the job has ended: {event.reason}"
                    break
                elif isinstance(event, EtcdUnreachable):
                    print_note(f"etcd does not answer, still waiting: {event.reason}")
                if answer is not None and answer.is_done:  # the driver answers only after it has seen all reports
                    break
    except CoordinationError as error:
        if not reports:
            raise
        problem = str(error)
    return _print_checks(job, expected, reports, answer, problem, is_json=args.is_json)


def _results(reports: Iterable[CheckReport]) -> Iterable[CheckResult]:
    return (result for report in reports for result in report.results)


def _joined(before: CheckReport | None, report: CheckReport) -> CheckReport:
    """Merge a host's reports: one of its own checks, and one for each neighbor that it was tested with."""
    if before is None or before.session != report.session:
        return report
    known = {(result.name, result.partner): result for result in (*before.results, *report.results)}
    return replace(report, results=tuple(known.values()))


def _print_checks(
    job: OpenJob,
    expected: Iterable[str],
    reports: dict[str, CheckReport],
    answer: Answer | None,
    problem: str,
    *,
    is_json: bool,
) -> int:
    ordered = [reports[host] for host in sorted(reports, key=natural_order)]
    missing = sorted(set(expected) - set(reports), key=natural_order)
    has_bad_pair = any(result.partner and result.outcome is not CheckOutcome.PASSED for result in _results(ordered))
    is_fit = not missing and not has_bad_pair and all(report.is_fit for report in ordered)
    if is_json:
        print_json({
            "job": job.keys.job, "is_fit": is_fit, "reports": [check_document(report) for report in ordered],
            "missing": missing, "text": "" if answer is None else answer.text,
        })  # fmt: skip
    else:
        print_lines(check_lines(ordered) or ["no host has reported"])
        if answer is not None and answer.is_done:
            print_lines([answer.text])
    if missing:
        why = problem or ("" if answer is None else answer.text)
        print_note(f"no report from {names_text(missing)}" + (f": {why}" if why else ""))
    return int(ExitCode.OK if is_fit else ExitCode.FAILURE)
