"""`megatrain diag explain RUN --step N`: where the time of a step went, adding up to 100 %."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from megatrain.commands.argument_types import Verbs, whole_number
from megatrain.commands.printing import facts, table
from megatrain.contracts.errors import DataError, NotFoundError
from megatrain.formatting import count_text
from megatrain_diagnostics.analysis.explain import Breakdown, StepExplanation, explain_step
from megatrain_diagnostics.analysis.step_windows import known_steps, read_step_events
from megatrain_diagnostics.commands.arguments import add_analysis, add_ranks, chosen_round, open_source, print_analysis
from megatrain_diagnostics.commands.overlap_table import overlap_document, overlap_table, overlapped_share

_MAX_RANKS = 32
_MAX_LATE = 5


def add_verb(verbs: Verbs) -> None:
    text = "the time of a step by category: compute, waiting, bubble, data, ..."
    parser = add_analysis(verbs, "explain", text, run, add_ranks)
    parser.add_argument("--step", type=whole_number(0, 2**31 - 2), required=True, metavar="N", help="which step")


def run(args: argparse.Namespace) -> int:
    """Explain a step. Raises: NotFoundError naming the known steps, if this step is not known."""
    source = open_source(args)
    round_number = chosen_round(args, source)
    events = read_step_events(source, round_number, args.step, args.step, args.ranks)
    try:
        found = explain_step(events, args.step)
    except DataError as error:
        raise NotFoundError(f"{args.place}: {error}; there are {known_steps(source, round_number)}") from error
    if not found.is_full:
        found = replace(found, notes=(*found.notes, f"there are {known_steps(source, round_number)}"))
    return print_analysis(args, lambda: _document(args.place, round_number, found), lambda: _lines(found))


def _document(place: str, round_number: int, found: StepExplanation) -> dict[str, Any]:
    return {
        "place": place,
        "round": round_number,
        "step": found.step,
        "is_full": found.is_full,
        "wall_ns": found.wall_ns,
        "job": _breakdown(found.job),
        "stages": [_breakdown(stage) for stage in found.stages],
        "ranks": [_breakdown(rank) for rank in found.ranks],
        "num_missing_ranks": found.num_missing,
        "communication": [overlap_document(overlap) for overlap in found.overlaps],
        "communication_by_stage": [
            {"name": stage.name, "communication": [overlap_document(overlap) for overlap in of_stage]}
            for stage, of_stage in zip(found.stages, found.overlaps_by_stage, strict=False)
        ],
        "came_last": [asdict(arrival) for arrival in found.last],
        "notes": list(found.notes),
    }


def _breakdown(breakdown: Breakdown) -> dict[str, Any]:
    return {**asdict(breakdown), "percent": breakdown.percent}


def _lines(found: StepExplanation) -> list[str]:
    lines = facts([
        ("step", f"{found.step}, {'every span' if found.is_full else 'sums only'}"),
        ("wall time", f"{found.wall_ns / 1e6:,.3f} ms (median of {found.job.num_ranks} ranks)"),
        *([("not known", count_text(found.num_missing, "rank"))] if found.num_missing else []),
    ])  # fmt: skip
    lines += ["", *_job_table(found.job)]
    if len(found.stages) > 1:
        lines += ["", *_comparison(found.stages)]
    if len(found.ranks) > 1:
        shown = sorted(found.ranks, key=lambda rank: -_busy(rank))[:_MAX_RANKS]
        if len(shown) < len(found.ranks):
            lines += ["", f"the {len(shown)} ranks of {len(found.ranks)} that computed longest:"]
        lines += ["", *_comparison(shown)]
    if found.overlaps:
        lines += ["", *overlap_table("communication of a rank", found.overlaps)]
        lines += _overlapped_by_stage(found)
    if found.last:
        lines += ["", "arrived last at collectives, so the others waited:"]
        lines += [
            f"  rank {arrival.rank} {arrival.host}: {arrival.num_collectives} collectives, "
            f"{arrival.waited_ns / 1e6:,.3f} ms of other ranks' time, most at {arrival.operation}"
            for arrival in found.last[:_MAX_LATE]
        ]
    return lines + [f"note: {note}" for note in found.notes]


def _overlapped_by_stage(found: StepExplanation) -> list[str]:
    """Return the overlapped shares by stage, for kinds of communication with different shares in the stages."""
    shares = [{overlap.operation: overlap for overlap in of_stage} for of_stage in found.overlaps_by_stage]
    differing = [
        kind.operation
        for kind in found.overlaps
        if len({overlapped_share(of_stage[kind.operation]) for of_stage in shares if kind.operation in of_stage}) > 1
    ]
    if not differing:
        return []
    rows: list[tuple[str, ...]] = [("share overlapped", *differing)]
    for stage, of_stage in zip(found.stages, shares, strict=True):
        rows.append((stage.name, *(overlapped_share(of_stage[kind]) if kind in of_stage else "" for kind in differing)))
    return ["", *table(rows, left=(0,))]


def _busy(breakdown: Breakdown) -> int:
    return breakdown.spent_ns.get("compute", 0)


def _job_table(job: Breakdown) -> list[str]:
    rows = [("", "time per rank", "share", "of it waiting for peers")]
    for name, amount in job.spent_ns.items():
        if amount:
            waiting = job.waiting_ns.get(name, 0)
            rows.append((
                name,
                f"{amount / job.num_ranks / 1e6:,.3f} ms",
                f"{job.percent[name]:.2f} %",
                f"{waiting / job.num_ranks / 1e6:,.3f} ms" if waiting else "",
            ))  # fmt: skip
    rows.append(("sum", f"{job.wall_ns / job.num_ranks / 1e6:,.3f} ms", "100.00 %" if job.wall_ns else "", ""))
    return table(rows, left=(0,))


def _comparison(parts: Sequence[Breakdown]) -> list[str]:
    names = [name for name in parts[0].spent_ns if any(part.spent_ns.get(name, 0) for part in parts)]
    rows: list[tuple[str, ...]] = [("percent", *names)]
    rows += [(part.name, *(f"{part.percent.get(name, 0.0):.2f}" for name in names)) for part in parts]
    return table(rows, left=(0,))
