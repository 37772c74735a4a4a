"""`megatrain diag on|off|set`: what the ranks of a running job record, and which steps are streamed in full.

The wish lies in etcd; the executor of each host hears of it and tells its ranks, those that start later too. A rank
obeys when it begins its next step. `set` without a wish only says what holds.
"""

from __future__ import annotations

import argparse
import getpass
import socket
import time
from dataclasses import replace
from typing import TypeAlias

from megatrain.commands.argument_types import real_number, utf8_text, whole_number
from megatrain.commands.job_place import OpenJob, add_job, opened_job
from megatrain.commands.printing import facts, print_json, print_lines
from megatrain.contracts.diag_records import SAMPLE_PERIOD, DiagSettings
from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.operations import Operation
from megatrain.contracts.record import decode, encode, to_plain
from megatrain.contracts.rounds import JobRecord
from megatrain.contracts.texts import seconds_text
from megatrain.coordination.wire import Compare, Put

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_NUM_TRIES = 10
_MOST_STEPS = 2**31 - 1
_MOST_S = 7 * 86400.0


def add_verb(verbs: Verbs) -> None:
    """Declare on, off and set."""
    _add(verbs, "on", "time all operations again, with the sample period of the configuration")
    _add(verbs, "off", "time nothing; progress is still seen, and hangs are still found")
    chosen = _add(verbs, "set", "change what is recorded and streamed; without options: say what holds")
    chosen.add_argument(
        "--sample-period",
        type=whole_number(1, _MOST_STEPS),
        metavar="N",
        help="stream one step in N with all its spans, of the others only the sums",
    )
    chosen.add_argument(
        "--full-for",
        type=real_number(f"seconds from 0 to {_MOST_S:.0f}", lambda value: 0 <= value <= _MOST_S),
        dest="full_for_s",
        metavar="SECONDS",
        help="for so long stream every step with all its spans; 0: end that now",
    )
    chosen.add_argument(
        "--without",
        type=operation_list,
        metavar="NAMES",
        help='operations that are not timed, with commas between, as tp-all-gather; "": time all',
    )


def operation_list(text: str) -> tuple[str, ...]:
    """Parse "gc,tp-all-gather"."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [operation.value for operation in Operation]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is no operation; use {', '.join(known)}")
    return tuple(sorted(set(names)))


def run(args: argparse.Namespace) -> int:
    """Change the settings and print them. Raises: CoordinationError where the job's etcd does not answer."""
    with opened_job(args) as job:
        period = _configured_period(job)
        is_wish = args.diag_verb != "set" or (args.sample_period, args.full_for_s, args.without) != (None, None, None)
        settings = _change(job, args, period) if is_wish else _read(job, period)
    _print(job.keys.job, settings, is_json=args.is_json)
    return int(ExitCode.OK)


def wished(before: DiagSettings, args: argparse.Namespace, period: int, now_unix_s: float) -> DiagSettings:
    """Return the settings that the command line asks for; `period` is that of the configuration."""
    if args.diag_verb == "on":
        changed = DiagSettings(is_on=True, sample_period=period)
    elif args.diag_verb == "off":
        changed = replace(before, is_on=False)
    else:
        changed = replace(before, is_on=True)
        if args.sample_period is not None:
            changed = replace(changed, sample_period=args.sample_period)
        if args.full_for_s is not None:
            changed = replace(changed, full_until_unix_s=now_unix_s + args.full_for_s if args.full_for_s else 0.0)
        if args.without is not None:
            changed = replace(changed, off_operations=args.without)
    return replace(changed, by=_asker(), reason=args.reason, at_unix_s=now_unix_s)


def _add(verbs: Verbs, name: str, text: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
    add_job(verb)
    verb.add_argument("--reason", default="", type=utf8_text, metavar="TEXT", help="why, for the records")
    verb.add_argument("--json", action="store_true", dest="is_json", help="print one JSON object")
    verb.set_defaults(run_verb=run)
    return verb


def _configured_period(job: OpenJob) -> int:
    """Return the sample period of the job's configuration. Raises: CoordinationError where there is no such job."""
    record = job.client.get(job.keys.record)
    if record is None:
        raise CoordinationError(f"job {job.keys.job!r}: etcd knows no job of this name")
    told = decode(JobRecord, record.value, job.keys.record).config.get("diagnostics.sample_period", "")
    return int(told) if told.isascii() and told.isdigit() and len(told) <= 10 else SAMPLE_PERIOD


def _read(job: OpenJob, period: int) -> DiagSettings:
    """Return what holds. Raises: CoordinationError where nobody can read it."""
    key = job.keys.diag_settings
    item = job.client.get(key)
    return DiagSettings(sample_period=period) if item is None else decode(DiagSettings, item.value, key)


def _change(job: OpenJob, args: argparse.Namespace, period: int) -> DiagSettings:
    """Write the wish over what holds at that moment: the daemon may ask for full steps at the same time."""
    key = job.keys.diag_settings
    for _ in range(_NUM_TRIES):
        item = job.client.get(key)
        try:
            before = DiagSettings(sample_period=period) if item is None else decode(DiagSettings, item.value, key)
        except CoordinationError:  # what nobody can read is written over
            before = DiagSettings(sample_period=period)
        settings = wished(before, args, period, time.time())
        unchanged = Compare.is_absent(key) if item is None else Compare.mod_revision(key, item.mod_revision)
        if job.client.txn([unchanged], [Put(key, encode(settings))]).is_met:
            return settings
    raise CoordinationError(f"{key}: somebody else writes it all the time; ask again")


def _asker() -> str:
    """Return user@machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # no name for this user id
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _print(job: str, settings: DiagSettings, *, is_json: bool) -> None:
    if is_json:
        print_json({"job": job, **to_plain(settings)})
        return
    left_s = settings.full_until_unix_s - time.time()
    steps = f"one step in {settings.sample_period}" if settings.sample_period > 1 else "every step"
    burst = f"; every step for the next {seconds_text(left_s)}" if left_s > 0 else ""
    lines = [
        ("job", job),
        ("spans", "timed" if settings.is_on else "not timed: megatrain diag on"),
        ("streamed in full", steps + burst),
        ("not timed", ", ".join(settings.off_operations) or "none"),
    ]
    if settings.by:
        lines.append(("asked by", f"{settings.by} {settings.reason}".strip()))
    print_lines(facts(lines))
