"""`megatrain logs classify FILE|RUN`: report from logs what failed, what to do about it, and which rank caused it.

FILE has JSON lines: objects with `id` and `log`, or with `id` and `ranks` = {rank: end of its log}; - is stdin. With
--text, FILE is one plain log. FILE may be compressed (gzip, bzip2, xz, Zstandard), UTF-16 or UTF-32. A directory, or
the name of a job, is a RUN: then the logs of all ranks of its newest round are classified. The culprit is taken from
the round's incident. Without an incident, a rank with a cause in its own log comes before ranks that lost the
connection to it or waited for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from megatrain.commands.argument_types import utf8_text
from megatrain.commands.printing import facts, print_json, print_lines, table
from megatrain.contracts.errors import DataError, UsageError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.formatting import printable, short
from megatrain_diagnostics.commands.arguments import (
    add_ranks,
    add_round,
    incident_culprit,
    problems_on_error,
    report_problems,
)
from megatrain_diagnostics.commands.log_file import as_utf8, opened_log
from megatrain_job.commands.job_location import run_at
from megatrain_job.failures.bundle import classify_bundle
from megatrain_job.failures.classifier import LogClassifier, classify

if TYPE_CHECKING:
    from megatrain_diagnostics.analysis.log_search import LogFinding

SUMMARY = "report from logs what failed, what to do about it, and which rank or host caused it"

_CHUNK_BYTES = 1 << 20
_MAX_FAILURES = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("place", metavar="FILE|RUN", type=utf8_text, help="JSON lines, - for stdin; or a run")
    parser.add_argument("--text", action="store_true", dest="is_text", help="FILE is a plain log, not JSON lines")
    add_round(parser)
    add_ranks(parser)
    parser.add_argument(
        "--json", action="store_true", dest="is_json", help="print JSON; for a FILE, one object per line"
    )


def run(args: argparse.Namespace) -> int:
    """Classify logs. Raises: UsageError, NotFoundError; DataError when the logs, or some lines, cannot be read."""
    if args.place != "-" and not Path(args.place).is_file() and run_at(args.place) is not None:
        if args.is_text:
            raise UsageError(f"--text is for a FILE, and {args.place} is a run; leave it out")
        with problems_on_error(args):
            _classify_run(args)
        return int(ExitCode.OK)
    if args.round is not None or args.ranks is not None:
        raise UsageError(f"--round and --ranks choose from a run, and {args.place} is not a run; leave them out")
    _classify_file(args)
    return int(ExitCode.OK)


def _classify_file(args: argparse.Namespace) -> None:
    problems: list[str] = []
    with _opened(args.place) as file:
        # read everything before printing, so that an error of printing is not reported as an error of reading
        answers = [_of_text(file, args.place)] if args.is_text else list(_of_lines(file, args.place, problems))
    for answer in answers:
        print(json.dumps(answer) if args.is_json else printable(_for_people(answer)))
    if problems:
        raise DataError("\n".join(problems))


def _classify_run(args: argparse.Namespace) -> None:
    # loaded late: classifying a file does not need the reader of events
    from megatrain_diagnostics.analysis.log_search import classify_logs
    from megatrain_diagnostics.commands.logs import open_logs
    from megatrain_diagnostics.events.roster import make_roster
    from megatrain_diagnostics.events.source import Where
    from megatrain_diagnostics.events.tables import Groups, Ranks, num_rows

    source, round_number, logs = open_logs(args)
    report_problems(args)
    where = Where(rounds=(round_number,))
    ranks = source.read(Ranks, where)
    is_known = args.ranks is None and num_rows(ranks) > 0
    roster = make_roster(ranks, source.read(Groups, where), round_number) if is_known else None
    found = classify_logs(logs, roster, incident_culprit(args, round_number))
    _print_finding(found, round_number, is_json=args.is_json)


def _print_finding(found: LogFinding, round_number: int, *, is_json: bool) -> None:
    classification, culprit = found.classification, found.culprit
    if is_json:
        values = {
            **classification.to_dict(),
            "label": found.label,
            "action": found.action,
            "root_rank": min(culprit.ranks, default=None),
            "root_hosts": culprit.hosts,
            "reason": culprit.reason,
            "incident": culprit.incident,
        }
        failures = [asdict(failure) for failure in found.failures]
        print_json({"round": round_number, **values, "num_ranks": found.num_ranks, "failures": failures})
        return
    lines = facts(
        [
            ("round", f"{round_number}: {found.num_lines:,} lines of {found.num_ranks:,} ranks"),
            ("verdict", f"{found.label}; action {found.action}"),
            ("began at", culprit.text or "no rank"),
            ("because", culprit.reason),
            *([("incident", culprit.incident)] if culprit.incident else []),
            ("names", classification.culprit or "-"),
            ("line", short(classification.line.strip()) or "-"),
        ]
    )
    if found.failures:
        rows = [("rank", "host", "", "label", "line")]
        for failure in found.failures[:_MAX_FAILURES]:
            rows.append((str(failure.rank), failure.host, str(failure.role), failure.label, short(failure.line)))
        lines += ["", *table(rows, left=(1, 2, 3, 4))]
        if len(found.failures) > _MAX_FAILURES:
            lines.append(f"and {len(found.failures) - _MAX_FAILURES} more")
    print_lines(lines)


def _opened(name: str) -> contextlib.AbstractContextManager[BinaryIO]:
    if name == "-":
        return contextlib.nullcontext(as_utf8(sys.stdin.buffer, "standard input"))
    return opened_log(Path(name))


def _of_text(file: BinaryIO, name: str) -> dict[str, Any]:
    classifier = LogClassifier()
    while chunk := file.read(_CHUNK_BYTES):
        classifier.feed(chunk)
    return {"id": name, **classifier.finish().to_dict()}


def _of_lines(file: BinaryIO, name: str, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the answer to each valid line; add a sentence about each other line to `problems`."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield answer(json.loads(line))
        except json.JSONDecodeError as error:
            problems.append(f"{name}:{number}: is not JSON ({error}); --text reads a log as it was printed")
        except (ValueError, RecursionError) as error:
            problems.append(f"{name}:{number}: {error}")


def answer(case: object) -> dict[str, Any]:
    """Return the answer to one object. Raises: ValueError if the object does not have the documented form."""
    if not isinstance(case, dict):
        raise ValueError(f"a {type(case).__name__}, expected an object with id and log, or id and ranks")
    if "id" not in case:
        raise ValueError("no id; expected an object with id and log, or id and ranks")
    log, ranks = case.get("log"), case.get("ranks")
    if isinstance(log, str) and ranks is None:
        return {"id": case["id"], **classify(log).to_dict()}
    if log is None and isinstance(ranks, dict) and ranks and all(isinstance(tail, str) for tail in ranks.values()):
        bundle = classify_bundle(ranks)
        root = bundle.root_rank
        return {
            "id": case["id"],
            **bundle.verdict.to_dict(),
            "root_rank": int(root) if root is not None and root.isdecimal() else root,
            "reason": bundle.reason,
        }
    raise ValueError(f"id {case['id']!r}: expected either log, a string, or ranks, an object of strings by rank")


def _for_people(answer: dict[str, Any]) -> str:
    role = " (follows from another rank's failure)" if answer["cascade"] else ""
    lines = [f"{answer['id']}: {answer['label']}{role}; action {answer['action']}"]
    if answer.get("root_rank") is not None:
        lines.append(f"  began at rank {answer['root_rank']}: {answer['reason']}")
    if answer["culprit"]:
        lines.append(f"  names {answer['culprit']}")
    if answer["line"]:
        lines.append(f"  by rule {answer['rule']}: {answer['line'].strip()}")
    return "\n".join(lines)
