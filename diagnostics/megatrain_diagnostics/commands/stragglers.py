"""`megatrain diag stragglers`: who makes the job slow, why, and how sure that is."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from megatrain.commands.argument_types import real_number, whole_number
from megatrain.commands.printing import facts, print_json, print_lines
from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.contracts.errors import DataError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.operations import Operation
from megatrain.contracts.texts import seconds_text
from megatrain_diagnostics.analysis.findings import Finding, Thresholds
from megatrain_diagnostics.analysis.straggler_history import STEPS_AT_ONCE, StragglerHistory, straggler_history
from megatrain_diagnostics.commands.arguments import (
    Verbs,
    add_incarnation,
    add_json,
    add_place,
    add_steps,
    chosen_incarnation,
    open_source,
    tell_problems,
)
from megatrain_diagnostics.events.roster import Roster, make_roster
from megatrain_diagnostics.events.source import EventSource, Where
from megatrain_diagnostics.events.tables import Groups, Ranks, Spans, StepTotals, Values

_NEWEST_STEPS = 500
_MAX_SHOWN = 12
_LONGEST_GAP = 64
"""Between two steps that a rank tells of, one after the other: beyond it the later one is nonsense."""
_PROBES = 8
"""Ranks that are asked which steps there are."""


def add_verb(verbs: Verbs) -> None:
    config = DiagnosticsConfig()
    parser = verbs.add_parser("stragglers", help="who makes the job slow, and why", allow_abbrev=False)
    add_place(parser)
    add_incarnation(parser)
    add_steps(parser)
    parser.add_argument(
        "--excess",
        type=real_number("a number above 0", lambda value: 0.0 < value < float("inf")),
        default=config.straggler_excess,
        metavar="PART",
        help="least excess over the peers (default: %(default)s)",
    )
    parser.add_argument(
        "--score",
        type=real_number("a number of at least 0", lambda value: 0.0 <= value < float("inf")),
        default=config.straggler_score,
        help="least robust score (default: %(default)s)",
    )
    parser.add_argument(
        "--lasting",
        type=whole_number(2, 1024),
        default=config.straggler_steps,
        metavar="STEPS",
        help="it must last so long (default: %(default)s)",
    )
    add_json(parser)
    parser.set_defaults(run_verb=run)


def run(args: argparse.Namespace) -> int:
    """Print. Raises: DataError where there are no such events."""
    source = open_source(args)
    incarnation = chosen_incarnation(args, source)
    of_round = Where(incarnations=(incarnation,))
    roster = make_roster(source.read(Ranks, of_round), source.read(Groups, of_round), incarnation)
    first, last = _step_range(source, roster, args.steps)
    found = straggler_history(
        roster,
        Thresholds(args.excess, args.score, args.lasting),
        lambda: _steps(source, incarnation, first, last),
        lambda ranks: _passes(source, incarnation, first, last, ranks),
    )
    tell_problems(args)
    if args.is_json:
        print_json({"place": args.place, "incarnation": incarnation, **_document(found)})
    else:
        print_lines(_lines(found, roster))
    return int(ExitCode.OK)


def _step_range(source: EventSource, roster: Roster, asked: tuple[int | None, int | None]) -> tuple[int, int]:
    """Return the first and last step to look at: the newest, unless others are asked for."""
    known = sorted(roster.hosts)
    probes = tuple(known[:: max(1, len(known) // _PROBES)])
    rows = source.read(StepTotals, Where((roster.incarnation,), asked[0], asked[1], probes, (Operation.STEP.number,)))
    if not len(rows.step):
        between = "" if asked == (None, None) else f" between steps {asked[0] or 0} and {asked[1] or 'the newest'}"
        raise DataError(f"incarnation {roster.incarnation} has no sums of steps{between}; is streaming on (diag on)?")
    last = _newest_step(rows)
    return (int(rows.step.min()) if asked[0] is not None else max(int(rows.step.min()), last - _NEWEST_STEPS + 1)), last


def _newest_step(rows: StepTotals) -> int:
    """Return how far ranks have come; numbers that are nonsense, of one rank or now and then, move nothing."""
    newest = []
    for rank in np.unique(rows.rank).tolist():
        steps = np.unique(rows.step[rows.rank == rank]).astype(np.int64)
        near = np.flatnonzero(np.diff(steps) <= _LONGEST_GAP)
        newest.append(int(steps[near[-1] + 1] if len(near) else steps[0]))
    # a quarter of the ranks may be wrong; of few all may be silent but one
    return sorted(newest)[(len(newest) - 1) * 3 // 4 if len(newest) > 3 else -1]


def _steps(source: EventSource, incarnation: int, first: int, last: int) -> Iterator[tuple[StepTotals, Values]]:
    for begin in range(first, last + 1, STEPS_AT_ONCE):
        where = Where((incarnation,), begin, min(begin + STEPS_AT_ONCE - 1, last))
        yield source.read(StepTotals, where), source.read(Values, where)


def _passes(source: EventSource, incarnation: int, first: int, last: int, ranks: tuple[int, ...]) -> Spans:
    passes = (Operation.FORWARD_COMPUTE.number, Operation.BACKWARD_COMPUTE.number)
    return source.read(Spans, Where((incarnation,), first, last, ranks, passes))


def _document(found: StragglerHistory) -> dict[str, Any]:
    end = found.assessment
    return {
        "first_step": end.first_step,
        "last_step": end.last_step,
        "num_steps": found.num_compared,
        "num_left_out": end.num_left_out,
        "is_enough": end.is_enough,
        "findings": [
            {
                **asdict(one),
                "cause": one.cause.value,
                "confidence": one.confidence.value,
                "is_over": one.key in found.ended,
            }
            for one in found.findings
        ],
        "unjudged_ranks": list(end.unjudged_ranks),
        "silent_ranks": list(end.silent_ranks),
        "num_wrong_rows": found.num_wrong,
    }


def _lines(found: StragglerHistory, roster: Roster) -> list[str]:
    end = found.assessment
    lines = [_headline(found)]
    for one in found.findings:
        lines += ["", *_of_finding(one, one.key in found.ended)]
    lines.append("")
    said = [
        ("steps", f"{found.num_compared} compared, {end.num_left_out} left out (first steps, checkpoints, evaluations)")
    ]
    if end.unjudged_ranks:
        said.append(("not judged", f"{_ranks(end.unjudged_ranks)}: nobody does the same work"))
    if end.silent_ranks:
        said.append(("0 samples", f"from {_ranks(end.silent_ranks)} in the newest steps"))
    if found.num_wrong:
        said.append(("passed over", f"{found.num_wrong} rows that cannot be"))
    return [*lines, *facts([("ranks", f"{roster.layout.world_size} ({roster.layout})"), *said])]


def _headline(found: StragglerHistory) -> str:
    if found.findings:
        worst = found.findings[0]
        where = ", ".join(worst.hosts) or "no single host"
        return f"{len(found.findings)} found; first: {worst.cause.value}, {where}, {worst.confidence.value} confidence"
    if not found.assessment.is_enough:
        return "insufficient evidence: too few steps, or ranks without peers"
    return "nobody is slower than its peers"


def _of_finding(one: Finding, is_over: bool) -> list[str]:
    ended = ", and no longer" if is_over else ""
    pairs = [
        (
            "cause",
            one.cause.value + (" (another host would be faster)" if one.cause.is_of_host else " (not the host's)"),
        ),
        ("confidence", one.confidence.value),
        ("where", f"{', '.join(one.hosts) or '-'}; {_ranks(one.ranks)}"),
        ("when", f"steps {one.first_step} to {one.last_step}, seen in {one.num_seen} of {one.num_steps}{ended}"),
        ("excess", f"{100 * one.excess:.1f} % ({seconds_text(one.excess_s)} a step), score {one.score:.1f}"),
        ("victims", f"{one.num_victims} ranks wait for it"),
        ("gain", f"at most {seconds_text(one.gain_s)} of {seconds_text(one.step_s)} a step"),
    ]
    return [*facts(pairs), *(f"- {sentence}" for sentence in one.evidence)]


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_SHOWN])) + (" ..." if len(ranks) > _MAX_SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"
