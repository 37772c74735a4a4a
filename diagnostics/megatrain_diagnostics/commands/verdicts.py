"""`megatrain diag verdicts [JOB]`: the verdicts of the diagnosis, and the driver's outcomes.

They are read from etcd. If the job is not found there, or etcd does not answer, they are read from the audit file in
<run>/incidents.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from megatrain.commands.argument_types import Verbs, add_json, utf8_text
from megatrain.commands.printing import facts, print_note, print_result, table
from megatrain.contracts.errors import (
    CoordinationError,
    CoordinationRefusedError,
    DataError,
    MegatrainError,
    NotFoundError,
    UsageError,
)
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.record import to_plain
from megatrain.formatting import age_text, count_text, names_text, ranks_text, short, time_text
from megatrain.run_files.incidents import AUDIT_NAME, read_audit
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.commands.job_location import JobLocationError, add_job, named_job, opened_job, run_at
from megatrain_job.jobs.verdict_cases import VerdictWithOutcome, cases_of_audit, read_cases


def add_verb(verbs: Verbs) -> None:
    """Add the subcommand `verdicts` and its arguments."""
    text = "verdicts of the diagnosis on hosts and on the training, each with the driver's outcome"
    verb = verbs.add_parser("verdicts", help=text, description=text, allow_abbrev=False)
    add_job(verb)
    verb.add_argument(
        "--id", default="", type=utf8_text, metavar="ID", help="only this verdict; a unique prefix is enough"
    )
    add_json(verb)
    verb.set_defaults(run_verb=run)


def run(args: argparse.Namespace) -> int:
    """Print all verdicts, the newest first, or the verdict of --id. Raises: MegatrainError."""
    job, source, cases = _find(args)
    head = {"job": job, "source": source}
    if args.id:
        case = matching_case(job, cases, args.id)
        print_result(lambda: {**head, "verdict": _document(case)}, lambda: case_lines(case), is_json=args.is_json)
    else:
        print_result(
            lambda: {**head, "verdicts": [_document(case) for case in reversed(cases)]},
            lambda: cases_lines(job, cases, time.time()),
            is_json=args.is_json,
        )
    return int(ExitCode.OK)


def cases_lines(job: str, cases: Sequence[VerdictWithOutcome], now_s: float) -> list[str]:
    """Return a table of verdicts, the newest first."""
    lines = [f"{job}: {count_text(len(cases), 'verdict')}"]
    if not cases:
        return lines
    rows = [["id", "ago", "kind", "cause", "where", "confidence", "outcome", "why"]]
    for case in reversed(cases):
        verdict, outcome = case.verdict, case.outcome
        at_s = verdict.created_unix_s if verdict is not None else outcome.at_unix_s if outcome is not None else now_s
        cells = ["?"] * 4
        if verdict is not None:
            cells = [verdict.kind, verdict.cause, names_text(verdict.hosts, most=3) or "-", verdict.confidence]
        decision = ["-", "no outcome yet"] if outcome is None else [str(outcome.kind), short(outcome.reason)]
        rows.append([case.verdict_id, age_text(at_s, now_s), *map(str, cells), *decision])
    return [*lines, "", *table(rows, left=(0, 2, 3, 4, 5, 6, 7))]


def case_lines(case: VerdictWithOutcome) -> list[str]:
    """Return all details of one verdict."""
    verdict, outcome = case.verdict, case.outcome
    found: list[tuple[str, str]] = []
    if verdict is not None:
        where = "; ".join(filter(None, (names_text(verdict.hosts), ranks_text(verdict.ranks))))
        found += [
            ("what", f"{verdict.kind}, {verdict.cause}, confidence {verdict.confidence}"),
            ("where", where or "-"),
            ("when", f"{time_text(verdict.created_unix_s)}, in round {verdict.round}, by {verdict.by}"),
            ("steps", f"{verdict.first_step} to {verdict.last_step}"),
            ("gain", f"{verdict.gain_s_per_step:.4g} s of {verdict.step_s or 0:.4g} s a step"),
        ]
        if verdict.rollback_to is not None:
            without = f"without the batches of steps {verdict.skip_from} to {verdict.skip_to}"
            found.append(("proposes", f"back to step {verdict.rollback_to} or before, {without}"))
    if outcome is not None:
        who = f" (by {outcome.by})" if outcome.by else ""
        found.append(("outcome", f"{outcome.kind}{who}, {time_text(outcome.at_unix_s)}, driver {outcome.driver}"))
        found.append(("because", outcome.reason))
        found.append(("balance", f"gain {outcome.gain_s:.4g} s, cost {outcome.cost_s:.4g} s"))
        if outcome.incident:
            found.append(("incident", outcome.incident))
    lines = [case.verdict_id, "", *facts(found)]
    if verdict is not None and verdict.evidence:
        lines += ["", "evidence", *(f"  {number}. {text}" for number, text in enumerate(verdict.evidence, 1))]
    return lines


def _document(case: VerdictWithOutcome) -> dict[str, Any]:
    return {
        "verdict_id": case.verdict_id,
        "verdict": None if case.verdict is None else to_plain(case.verdict),
        "outcome": None if case.outcome is None else to_plain(case.outcome),
    }


def matching_case(job: str, cases: Sequence[VerdictWithOutcome], wanted: str) -> VerdictWithOutcome:
    """Return the verdict of this id or prefix. Raises: NotFoundError, or UsageError if several match."""
    matches = [case for case in cases if case.verdict_id == wanted]
    matches = matches or [case for case in cases if case.verdict_id.startswith(wanted)]
    if len(matches) == 1:
        return matches[0]
    names = names_text([match.verdict_id for match in (matches or cases)]) or "none"
    if matches:
        raise UsageError(f"{len(matches)} verdicts begin with {wanted!r}: {names}; give more characters")
    raise NotFoundError(f"{job} has no verdict {wanted!r}; it has {names}")


def _find(args: argparse.Namespace) -> tuple[str, str, list[VerdictWithOutcome]]:
    """Return the job, the source of the verdicts, and the verdicts, the oldest first."""
    try:
        with opened_job(args) as job:
            cases, unreadable = read_cases(job.client, job.keys)
            for problem in unreadable:
                print_note(f"left out: {problem}")
            return job.keys.job, "etcd", cases
    except CoordinationRefusedError:
        raise
    except (CoordinationError, JobLocationError) as error:
        return _on_disk(named_job(args), error)


def _on_disk(place: str, error: MegatrainError) -> tuple[str, str, list[VerdictWithOutcome]]:
    run_directory = run_at(place)
    directory = None if run_directory is None else RunDirectory(run_directory).incidents
    if directory is None or not directory.is_dir():
        raise error
    path = directory / AUDIT_NAME
    try:
        entries, num_damaged = read_audit(path)
    except OSError as problem:
        raise DataError(f"{path}: cannot be read: {problem.strerror}") from problem
    if num_damaged:
        print_note(f"left out: {count_text(num_damaged, 'line')} of {path} that cannot be read")
    reason = str(error).partition("\n")[0]
    print_note(f"note: not read from etcd ({reason}); this is from {path}")
    return str(run_directory), str(path), cases_of_audit(entries)
