"""`megatrain status [JOB]`: whether the job is healthy; if not, what is wrong, where, since when, and what was done.

If etcd does not answer, the command shows the state that the run directory has, within two seconds.
"""

from __future__ import annotations

import argparse
import time
from enum import IntEnum
from pathlib import Path

from megatrain.commands.argument_types import add_json
from megatrain.commands.printing import facts, print_json, print_lines, print_note
from megatrain.contracts.errors import CoordinationError, CoordinationRefusedError, MegatrainError, UnknownJobError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.formatting import age_text, short
from megatrain_job.commands.etcd_flags import EtcdFlags, etcd_flags
from megatrain_job.commands.job_location import JobLocationError, add_job, job_location, named_job, opened_job, run_at
from megatrain_job.jobs.assessment import Assessment, assess
from megatrain_job.jobs.documents import incident_document, status_document
from megatrain_job.jobs.health import HealthLevel
from megatrain_job.jobs.job_state import JobState
from megatrain_job.jobs.run_state import (
    LastKnown,
    RunKind,
    RunState,
    read_facts,
    read_last_known,
    run_state_of,
)
from megatrain_job.jobs.snapshot import JobSnapshot, read_job
from megatrain_launcher.commands.live_view import LiveView
from megatrain_launcher.commands.status_text import MANY_HOSTS, MANY_REASONS, status_lines

SUMMARY = "show whether a job is healthy, and if not, what is wrong and what is done about it"
_CALL_S = 1.0
"""Time limit for an answer of etcd. After it, the state in the run directory is shown."""


class StatusCode(IntEnum):
    """Exit codes of `megatrain status`, one for each kind of answer. UNREACHABLE is equal to ExitCode.COORDINATION."""

    GREEN = 0
    AMBER = 3
    RED = 4
    ENDED = 5
    KILLED = 6
    NEVER_STARTED = 7
    UNREACHABLE = int(ExitCode.COORDINATION)


_OF_LEVEL = {
    HealthLevel.GREEN: StatusCode.GREEN,
    HealthLevel.AMBER: StatusCode.AMBER,
    HealthLevel.RED: StatusCode.RED,
}
_OF_KIND = {
    RunKind.ENDED: StatusCode.ENDED,
    RunKind.KILLED: StatusCode.KILLED,
    RunKind.NEVER_STARTED: StatusCode.NEVER_STARTED,
    RunKind.UNREACHABLE: StatusCode.UNREACHABLE,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    add_job(parser)
    form = parser.add_mutually_exclusive_group()
    add_json(form)
    form.add_argument("--watch", action="store_true", dest="is_watching",
                      help="redraw at each change, until the job is over")  # fmt: skip
    parser.add_argument("--all", action="store_true", dest="is_all", help="show all hosts and all reasons; "
                        f"without it, of more than {MANY_HOSTS} hosts, only those with a problem are shown, at most "
                        f"{MANY_HOSTS}; of the reasons, at most {MANY_REASONS}")  # fmt: skip
    parser.epilog = (
        "Exit codes: 0 green, 3 amber, 4 red, 5 the job is over, 6 its launch was killed, 7 it was never started, "
        "68 etcd does not answer. With --watch: 0 when the job is over."
    )


def run(args: argparse.Namespace) -> int:
    """Print the state of the job; the exit code reflects it (StatusCode).

    Raises: JobLocationError; CoordinationError when there is no known run directory to use instead of etcd.
    """
    try:
        with opened_job(args, call_s=_CALL_S) as job:
            if args.is_watching:
                LiveView(job.client, job.keys, is_all=args.is_all).run()
                return int(StatusCode.GREEN)
            snapshot = known(read_job(job.client, job.keys))
    except CoordinationRefusedError:
        raise
    except (CoordinationError, JobLocationError) as error:
        return _from_directory(args, error)
    now_s = time.time()
    answer = assess(snapshot, now_s)
    kind = kind_of(answer)
    if args.is_json:
        print_json({"kind": str(kind), **status_document(snapshot, answer, now_s)})
    else:
        print_lines(status_lines(snapshot, answer, now_s, is_all=args.is_all))
    return int(_OF_LEVEL[answer.health.level] if kind is RunKind.RUNNING else _OF_KIND[kind])


def kind_of(answer: Assessment) -> RunKind:
    """Return the kind of answer for a job in etcd."""
    if answer.state is JobState.NOT_RUNNING:
        return RunKind.KILLED
    return RunKind.ENDED if answer.is_over else RunKind.RUNNING


def known(snapshot: JobSnapshot) -> JobSnapshot:
    """Return the snapshot of a job that exists. Raises: UnknownJobError."""
    if snapshot.exists:
        return snapshot
    raise UnknownJobError(f"job {snapshot.job!r}: etcd has no job of this name; `megatrain launch` starts one")


def _from_directory(args: argparse.Namespace, error: MegatrainError) -> int:
    """Print the run directory's state in place of etcd's. Raises: `error` if there is no directory."""
    run = _run_directory(args)
    if run is None:
        raise error
    last, now_s = read_last_known(run), time.time()
    state = run_state_of(read_facts(run), last)
    if state.kind is RunKind.UNREACHABLE:
        print_note(str(error).partition("\n")[0])
    if args.is_json:
        print_json(_document(run, state, last, now_s))
    else:
        print_lines(_lines(run, state, last, now_s))
    return int(_OF_KIND[state.kind])


def _run_directory(args: argparse.Namespace) -> Path | None:
    name = named_job(args)
    try:
        return job_location(args).run_directory
    except JobLocationError:
        if etcd_flags(args) != EtcdFlags():
            return None  # the etcd that the user named is wrong
        return run_at(name) or (Path(name) if "/" in name else None)


def _lines(run: Path, state: RunState, last: LastKnown, now_s: float) -> list[str]:
    found = [("run", str(run))]
    if last.saved_step is not None and last.saved_unix_s is not None:
        found.append(("checkpoint", f"step {last.saved_step:,}, {age_text(last.saved_unix_s, now_s)} ago"))
    if last.incident is not None:
        incident = last.incident
        age = age_text(incident.moments.began, now_s)
        found.append(
            ("last incident", f"{incident.incident_id}, {age} ago, {incident.state}: {short(incident.reason)}")
        )
    return [f"{run}: {state.headline}", "", *facts(found)]


def _document(run: Path, state: RunState, last: LastKnown, now_s: float) -> dict[str, object]:
    return {
        "kind": str(state.kind),
        "headline": state.headline,
        "exit_code": state.exit_code,
        "at_unix_s": now_s,
        "run_directory": str(run),
        "checkpoint_step": last.saved_step,
        "checkpoint_unix_s": last.saved_unix_s,
        "incidents": [] if last.incident is None else [incident_document(last.incident)],
    }
