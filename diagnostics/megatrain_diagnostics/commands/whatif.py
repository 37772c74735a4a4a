"""`megatrain diag whatif`: replay steps with other durations to find the cost of stragglers, and the slowest ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.commands.argument_types import Verbs, add_json, utf8_path, utf8_text
from megatrain.commands.printing import facts, print_note, print_result, table
from megatrain.contracts.errors import DataError, UsageError

if TYPE_CHECKING:
    from megatrain_diagnostics.analysis.whatif import JobShape, OperationTable, WhatIf
    from megatrain_diagnostics.analysis.whatif.metrics import PartSlowdowns

_SHOWN_PARTS = 8
_SHOWN_NOTES = 10


def add_verb(verbs: Verbs) -> None:
    """Add the subcommand `whatif`."""
    from megatrain_diagnostics.commands.arguments import add_round, add_steps

    parser = verbs.add_parser(
        "whatif",
        help="what stragglers cost, and which ranks they are, by replaying recorded steps",
        allow_abbrev=False,
    )
    parser.add_argument(
        "place",
        type=utf8_text,
        nargs="?",
        metavar="RUN",
        help="a run or a directory of events; use --trace for a trace file",
    )
    parser.add_argument(
        "--trace", type=utf8_path, metavar="FILE", help="analyze this trace in the public Parquet format"
    )
    parser.add_argument(
        "--meta", type=utf8_path, metavar="FILE", help="metadata of the trace (default: FILE.yaml beside it)"
    )
    parser.add_argument(
        "--export-trace",
        type=utf8_path,
        metavar="FILE",
        help="also write the steps in the public format, with FILE.yaml beside it",
    )
    add_steps(parser)
    add_round(parser)
    add_json(parser)
    parser.set_defaults(run_verb=run)


def run(args: argparse.Namespace) -> int:
    """Analyze a trace file or the events of a job. Raises: DataError, NotFoundError, UsageError."""
    from megatrain_diagnostics.analysis.whatif import make_model, what_if
    from megatrain_diagnostics.analysis.whatif.figures import public_figures

    if (args.trace is None) == (args.place is None):
        raise UsageError("name either RUN (the events of a job) or --trace FILE (a trace in the public format)")
    if args.export_trace is not None:
        _check_export(args)
    operations, shape = _from_trace(args) if args.trace is not None else _from_events(args)
    if args.export_trace is not None:
        _export(args.export_trace, operations, shape)
    result = what_if(make_model(operations, shape))
    print_result(lambda: public_figures(result, shape), lambda: _summary(result, shape), is_json=args.is_json)
    return 0


def _from_trace(args: argparse.Namespace) -> tuple[OperationTable, JobShape]:
    from megatrain_diagnostics.store.public_trace import read_meta, read_trace

    if args.round is not None:
        raise UsageError("--round: a trace contains a single round; leave the option out")
    meta = args.meta or args.trace.with_suffix(".yaml")
    return read_trace(args.trace).between(*args.steps), read_meta(meta)


def _from_events(args: argparse.Namespace) -> tuple[OperationTable, JobShape]:
    from megatrain_diagnostics.analysis.whatif.from_spans import SPAN_OPERATIONS, operations_of
    from megatrain_diagnostics.commands.arguments import chosen_round, open_source, report_problems
    from megatrain_diagnostics.events.clocks import align
    from megatrain_diagnostics.events.roster import read_roster
    from megatrain_diagnostics.events.source import Where
    from megatrain_diagnostics.events.tables import Clocks, Spans

    if args.meta is not None:
        raise DataError("--meta is for --trace only; the events of a job already contain its layout")
    source = open_source(args)
    round_number = chosen_round(args, source)
    roster = read_roster(source, round_number)
    first, last = args.steps
    spans = source.read(Spans, Where((round_number,), first, last, operations=SPAN_OPERATIONS))
    spans = align(spans, source.read(Clocks), roster.hosts)
    report_problems(args)
    return operations_of(spans, roster, args.place)


def _check_export(args: argparse.Namespace) -> None:
    """Raise DataError if the exported trace and its metadata would be one file, or would overwrite the source."""
    written = {args.export_trace.absolute(), args.export_trace.with_suffix(".yaml").absolute()}
    if len(written) == 1:
        raise DataError(
            f"--export-trace={args.export_trace}: its metadata file would have the same name; use a name that "
            "ends in .parquet"
        )
    read = {path.absolute() for path in (args.trace, args.meta) if path is not None}
    if read & written:
        raise DataError(
            f"--export-trace={args.export_trace}: the export would overwrite the trace or metadata that is analyzed; "
            "name another file"
        )


def _export(path: Path, operations: OperationTable, shape: JobShape) -> None:
    from megatrain_diagnostics.store.public_trace import write_meta, write_trace

    write_trace(path, operations)
    meta = path.with_suffix(".yaml")
    write_meta(meta, shape)
    print_note(f"wrote {path} and {meta}")


def _summary(result: WhatIf, shape: JobShape) -> list[str]:
    from megatrain_diagnostics.analysis.whatif.figures import advice

    steps = list(result.measured_s)
    measured = sum(result.measured_s.values()) / len(steps)
    pairs = [
        ("job", f"{shape.trial_name}, {shape.world_size} ranks (dp {shape.dp_size}, pp {shape.pp_size})"),
        ("steps", f"{len(steps)}, from {min(steps)} to {max(steps)}; {measured:.3f} s on average"),
        ("S", f"{result.slowdown:.3f} times as long as without stragglers; {result.waste:.1%} of the time wasted"),
        ("gaps", f"{result.launch_slowdown:.3f} times as long as without gaps between operations"),
        ("M_W", f"{result.workers.rem:.1%} of the slowdown disappears without the slowest 3 % of the workers"),
    ]
    if result.has_stages:
        pairs.append(
            ("M_S", f"{result.last_stage.rem:.1%} of the slowdown disappears without the last stage's slowness")
        )
    lines = facts(pairs)
    for title, parts in (
        ("operation", result.parts.by_optype),
        ("dp rank", result.parts.by_dp_rank),
        ("stage", result.parts.by_stage),
    ):
        if len(parts.overall) > 1:  # a single part has the whole slowdown
            lines += ["", *_slowest(title, parts)]
    lines += ["", advice(result)]
    lines += [f"note: {note}" for note in result.notes[:_SHOWN_NOTES]]
    if len(result.notes) > _SHOWN_NOTES:
        lines.append(f"notes that are not shown: {len(result.notes) - _SHOWN_NOTES}")
    return lines


def _slowest(title: str, parts: PartSlowdowns) -> list[str]:
    """Return a table of the slowest parts, each with the slowdown of a step in which only this part is not ideal."""
    shown = list(parts.overall.items())[:_SHOWN_PARTS]
    rows = [(title, "slowdown"), *((name, f"{slowdown:.3f}") for name, slowdown in shown)]
    lines = table(rows, left=(0,))
    left = len(parts.overall) - len(shown)
    return [*lines, f"({left} more, less slow)"] if left else lines
