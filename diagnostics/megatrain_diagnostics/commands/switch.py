"""`megatrain diag on|off|set`: what the ranks of a running job record, and which steps are streamed in full.

The settings are in etcd; the executor of each host watches them and passes them to its ranks, including later ones. A
rank applies new settings at the start of its next step. `set` with options also undoes `off`. `set` without options
only prints the current settings.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from megatrain.commands.argument_types import Verbs, add_json, real_number, utf8_text, whole_number
from megatrain.commands.printing import facts, print_json, print_lines
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.diag_records import DiagSettings
from megatrain.contracts.records.record import to_plain
from megatrain.formatting import seconds_text
from megatrain_job.commands.job_location import add_job, opened_job
from megatrain_job.jobs.recording import change_recording, configured_period, read_recording, switched
from megatrain_job.jobs.send_request import requester

_MAX_STEPS = 2**31 - 1
_MAX_S = 7 * 86400.0


def add_verb(verbs: Verbs) -> None:
    """Add the subcommands `on`, `off` and `set`."""
    _add(verbs, "on", "record operations again as configured; this undoes `off` and `set`")
    _add(verbs, "off", "time no operations; progress is still recorded, and hangs are still detected")
    chosen = _add(verbs, "set", "change what is recorded and streamed; without options: print the current settings")
    chosen.add_argument(
        "--sample-period",
        type=whole_number(1, _MAX_STEPS),
        metavar="N",
        help="stream one step in N with all its spans, and only the totals of other steps",
    )
    chosen.add_argument(
        "--full-for",
        type=real_number(f"seconds from 0 to {_MAX_S:.0f}", lambda value: 0 <= value <= _MAX_S),
        dest="full_for_s",
        metavar="SECONDS",
        help="stream all spans of every step for this time; 0: stop now",
    )
    chosen.add_argument(
        "--without",
        type=operation_list,
        metavar="NAMES",
        help='operations that are not timed, separated by commas, such as tp-all-gather; "": time all',
    )


def operation_list(text: str) -> tuple[str, ...]:
    """Return the sorted names of operations in a list such as "gc,tp-all-gather". Raises: ArgumentTypeError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [operation.value for operation in Operation]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is not an operation; use {', '.join(known)}")
    return tuple(sorted(set(names)))


def run(args: argparse.Namespace) -> int:
    """Change the settings and print them.

    Raises: JobLocationError if the command line identifies no job; CoordinationError if its etcd does not answer.
    """
    with opened_job(args) as job:
        period = configured_period(job.client, job.keys)
        is_change = args.diag_verb != "set" or (args.sample_period, args.full_for_s, args.without) != (None, None, None)
        if is_change:
            settings = change_recording(
                job.client, job.keys, period, lambda before: requested_settings(before, args, period, time.time())
            )
        else:
            settings = read_recording(job.client, job.keys, period)
    _print(job.keys.job, settings, is_json=args.is_json)
    return int(ExitCode.OK)


def requested_settings(before: DiagSettings, args: argparse.Namespace, period: int, now_unix_s: float) -> DiagSettings:
    """Return the settings that the command line requests; `period`: the configured sample period."""
    if args.diag_verb in ("on", "off"):
        changed = switched(before, is_on=args.diag_verb == "on", period=period)
    else:
        changed = replace(before, is_on=True)
        if args.sample_period is not None:
            changed = replace(changed, sample_period=args.sample_period)
        if args.full_for_s is not None:
            changed = replace(changed, full_until_unix_s=now_unix_s + args.full_for_s if args.full_for_s else 0.0)
        if args.without is not None:
            changed = replace(changed, off_operations=args.without)
    return replace(changed, by=requester(), reason=args.reason, at_unix_s=now_unix_s)


def _add(verbs: Verbs, name: str, text: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
    add_job(verb)
    verb.add_argument("--reason", default="", type=utf8_text, metavar="TEXT", help="reason to record")
    add_json(verb)
    verb.set_defaults(run_verb=run)
    return verb


def _print(job: str, settings: DiagSettings, *, is_json: bool) -> None:
    if is_json:
        print_json({"job": job, **to_plain(settings)})
        return
    left_s = settings.full_until_unix_s - time.time()
    steps = f"one step in {settings.sample_period}" if settings.sample_period > 1 else "every step"
    burst = f"; every step for the next {seconds_text(left_s)}" if left_s > 0 else ""
    lines = [
        ("job", job),
        ("spans", "timed" if settings.is_on else "not timed (`megatrain diag on` times them)"),
        ("streamed in full", steps + burst),
        ("not timed", ", ".join(settings.off_operations) or "none"),
    ]
    if settings.by:
        lines.append(("requested by", f"{settings.by} {settings.reason}".strip()))
    print_lines(facts(lines))
