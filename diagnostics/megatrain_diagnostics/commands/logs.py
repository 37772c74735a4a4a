"""`megatrain diag logs PLACE`: search the output of all ranks; --classify names what failed, the root cause first.

Lines come in order of time. A rank whose own log names a cause is blamed before those who lost it or waited for it.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict

from megatrain.commands.argument_types import whole_number
from megatrain.commands.printing import facts, print_json, print_lines, print_note, table
from megatrain.contracts.errors import DataError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.texts import short, time_text
from megatrain_diagnostics.analysis.log_search import LogFinding, classify_logs, matching_lines, newest_logged
from megatrain_diagnostics.commands.arguments import (
    Verbs,
    add_json,
    add_place,
    add_ranks,
    add_round,
    open_source,
    tell_problems,
)
from megatrain_diagnostics.events.roster import Roster, make_roster
from megatrain_diagnostics.events.source import EventSource, Where
from megatrain_diagnostics.events.tables import Groups, LogLines, Ranks, num_rows

_NS = 1_000_000_000
_MOST_FAILURES = 32


def add_verb(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verbs.add_parser("logs", help="search and judge the output of all ranks", description=__doc__)
    add_place(parser)
    add_round(parser)
    add_ranks(parser)
    parser.add_argument(
        "--grep", type=_pattern, default=None, metavar="RE", help="only lines that match this regular expression"
    )
    parser.add_argument(
        "--classify", action="store_true", dest="is_classified", help="say what failed and where it began"
    )
    parser.add_argument(
        "--last", type=whole_number(1), default=1000, metavar="N", help="newest N lines at the most (default: 1000)"
    )
    add_json(parser)
    parser.set_defaults(run_verb=run)


def run(args: argparse.Namespace) -> int:
    """Print lines or a verdict. Raises: DataError where no line was ever streamed."""
    if args.is_classified and args.grep is not None:
        raise DataError("--classify and --grep: a verdict needs all lines; name one of the two")
    source = open_source(args)
    round_number = newest_logged(source) if args.round is None else int(args.round)
    logs = source.read(LogLines, Where(rounds=(round_number,), ranks=args.ranks))
    if not num_rows(logs):
        raise DataError(f"{args.place}: no line of output of round {round_number} was streamed")
    if not args.is_json or args.is_classified:
        tell_problems(args)
    if args.is_classified:
        _print_verdict(classify_logs(logs, _roster(source, round_number, args)), round_number, args)
    else:
        _print_lines(logs, round_number, source, args)
    return int(ExitCode.OK)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error


def _roster(source: EventSource, round_number: int, args: argparse.Namespace) -> Roster | None:
    ranks = source.read(Ranks, Where(rounds=(round_number,)))
    if args.ranks is not None or not num_rows(ranks):
        return None
    return make_roster(ranks, source.read(Groups, Where(rounds=(round_number,))), round_number)


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
        print_note(f"{len(rows) - len(shown)} older lines match, too; see --last")


def _print_verdict(found: LogFinding, round_number: int, args: argparse.Namespace) -> None:
    verdict, root = found.verdict.verdict, found.verdict.root_rank
    root_rank = None if root is None else int(root)
    if args.is_json:
        values = {**verdict.to_dict(), "root_rank": root_rank, "reason": found.verdict.reason}
        failures = [asdict(one) for one in found.failures]
        print_json({"round": round_number, **values, "num_ranks": found.num_ranks, "failures": failures})
        return
    lines = facts(
        [
            ("round", f"{round_number}: {found.num_lines:,} lines of {found.num_ranks:,} ranks"),
            ("verdict", f"{verdict.label}; action {verdict.action}"),
            ("began at", "no rank" if root_rank is None else f"rank {root_rank}"),
            ("because", found.verdict.reason),
            ("names", verdict.culprit or "-"),
            ("line", short(verdict.line.strip()) or "-"),
        ]
    )
    if found.failures:
        rows = [("rank", "host", "", "label", "line")]
        for one in found.failures[:_MOST_FAILURES]:
            role = "root" if one.is_root else "follows" if one.is_cascade else "cause"
            rows.append((str(one.rank), one.host, role, one.label, short(one.line)))
        lines += ["", *table(rows, left=(1, 2, 3, 4))]
        if len(found.failures) > _MOST_FAILURES:
            lines.append(f"and {len(found.failures) - _MOST_FAILURES} more")
    print_lines(lines)
