"""`megatrain logs [RUN]`: search the output of all ranks; lines are sorted by time."""

from __future__ import annotations

import argparse
import re

from megatrain.commands.argument_types import add_json, utf8_text, whole_number
from megatrain.commands.printing import print_json, print_lines, print_note
from megatrain.contracts.errors import DataError, NotFoundError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.formatting import names_text, time_text
from megatrain_diagnostics.analysis.log_search import matching_lines, newest_logged
from megatrain_diagnostics.commands.arguments import (
    add_ranks,
    add_round,
    add_run,
    open_source,
    problems_on_error,
    report_problems,
)
from megatrain_diagnostics.events.source import EventSource, Where
from megatrain_diagnostics.events.tables import LogLines, num_rows, select

_NS = 1_000_000_000
SUMMARY = "search the output of all ranks; `logs classify` reports what failed and where the failure began"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_run(parser)
    parser.add_argument("--host", default="", type=utf8_text, metavar="HOST", help="only lines of ranks on this host")
    add_round(parser)
    add_ranks(parser)
    parser.add_argument(
        "--grep", type=_pattern, default=None, metavar="RE", help="only lines that match this regular expression"
    )
    parser.add_argument(
        "--last",
        type=whole_number(1),
        default=1000,
        metavar="N",
        help="print at most the newest N lines (default: 1000)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print lines. Raises: UsageError, NotFoundError; DataError if no line was streamed."""
    with problems_on_error(args):
        source, round_number, logs = open_logs(args)
        if args.host:
            logs = of_host(logs, args.host)
    if not args.is_json:
        report_problems(args)
    _print_lines(logs, round_number, source, args)
    return int(ExitCode.OK)


def open_logs(args: argparse.Namespace) -> tuple[EventSource, int, LogLines]:
    """Return the events, the chosen or newest round, and its lines. Raises: as `run`."""
    source = open_source(args)
    round_number = newest_logged(source) if args.round is None else int(args.round)
    logs = source.read(LogLines, Where(rounds=(round_number,), ranks=args.ranks))
    if not num_rows(logs):
        problem = f"{args.place}: no line of output of round {round_number} was streamed"
        raise DataError(problem) if args.round is None else NotFoundError(f"--round={args.round}: {problem}")
    return source, round_number, logs


def of_host(logs: LogLines, host: str) -> LogLines:
    """Return the lines of a host. Raises: NotFoundError naming the existing hosts."""
    chosen = logs.host == host
    if not chosen.any():
        raise NotFoundError(f"no line is from host {host!r}; there are {names_text(sorted(set(map(str, logs.host))))}")
    return select(logs, chosen)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid regular expression: {error}") from error


def _print_lines(logs: LogLines, round_number: int, source: EventSource, args: argparse.Namespace) -> None:
    rows = matching_lines(logs, args.grep)
    shown = rows[-args.last :]
    if args.is_json:
        lines = [
            {
                "rank": int(logs.rank[row]),
                "host": str(logs.host[row]),
                "at_unix_s": int(logs.at_ns[row]) / _NS,
                "line": str(logs.line[row]),
            }
            for row in shown
        ]
        print_json(
            {
                "round": round_number,
                "num_matching": len(rows),
                "lines": lines,
                "problems": source.problems(),
            }
        )
        return
    if not len(rows):
        print_note(f"none of {num_rows(logs):,} lines matches")
        return
    print_lines(
        [
            f"{time_text(int(logs.at_ns[row]) / _NS)} rank {logs.rank[row]} {logs.host[row]}: {logs.line[row]}"
            for row in shown
        ]
    )
    if len(shown) < len(rows):
        print_note(f"older lines that match too: {len(rows) - len(shown)}; --last shows more")
