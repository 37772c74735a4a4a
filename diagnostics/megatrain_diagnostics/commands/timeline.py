"""`megatrain diag timeline RUN --output FILE`: ranks x steps as a Chrome trace, which Perfetto opens."""

from __future__ import annotations

import argparse
import gzip
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatrain.commands.argument_types import Verbs, utf8_path, whole_number
from megatrain.commands.printing import facts, print_note
from megatrain.contracts.errors import DataError
from megatrain.formatting import bytes_text
from megatrain.run_files.run_directory import RunDirectory
from megatrain_diagnostics.analysis.chrome_trace import chrome_trace
from megatrain_diagnostics.analysis.step_windows import (
    full_steps,
    known_steps,
    newest_steps,
    read_step_events,
    spans_of_full_steps,
)
from megatrain_diagnostics.analysis.timeline import MAX_SLICES, Timeline, lay_out
from megatrain_diagnostics.commands.arguments import (
    add_analysis,
    add_ranks,
    add_steps,
    chosen_round,
    open_source,
    print_analysis,
)
from megatrain_diagnostics.events.clocks import align
from megatrain_diagnostics.events.source import EventSource, Where
from megatrain_diagnostics.events.tables import Clocks, Spans, Values
from megatrain_job.commands.job_location import run_at
from megatrain_job.jobs.notes import Note, read_notes

_NUM_DEFAULT_STEPS = 2


def add_verb(verbs: Verbs) -> None:
    text = "write the spans of ranks as a trace for Perfetto"
    parser = add_analysis(verbs, "timeline", text, run, add_ranks, add_steps)
    parser.add_argument(
        "--output",
        type=utf8_path,
        default=Path("timeline.json.gz"),
        metavar="FILE",
        help="file to write; uncompressed unless the name ends with .gz (default: timeline.json.gz)",
    )
    parser.add_argument(
        "--max-slices",
        type=whole_number(1),
        default=MAX_SLICES,
        metavar="N",
        help=f"draw at most N slices; the command reports which ones it leaves out (default: {MAX_SLICES:,})",
    )


def run(args: argparse.Namespace) -> int:
    """Write the timeline. Raises: DataError if there are no spans of these steps, or FILE cannot be written."""
    source = open_source(args)
    round_number = chosen_round(args, source)
    first, last = _steps(args.steps, source, round_number)
    events = read_step_events(source, round_number, first, last, args.ranks)
    where = Where(rounds=(round_number,), first_step=first, last_step=last, ranks=args.ranks)
    values = align(source.read(Values, where), source.read(Clocks), events.roster.hosts)
    timeline = lay_out(events, values, first, last, args.max_slices)
    if not timeline.num_slices:
        raise DataError(
            f"{args.place}: no span of steps {first} to {last} of these ranks; there are "
            f"{known_steps(source, round_number)}"
        )
    num_bytes = _write(timeline, args.output, _notes(args.place))
    for text in timeline.left_out:
        print_note(f"left out: {text}; choose fewer --ranks or --steps, or raise --max-slices")
    document = {
        "place": args.place,
        "round": round_number,
        "output": str(args.output),
        "num_bytes": num_bytes,
        "first_step": first,
        "last_step": last,
        "num_ranks": len({track.rank for track in timeline.tracks}),
        "num_tracks": len(timeline.tracks),
        "num_slices": timeline.num_slices,
        "num_flows": len(timeline.flows),
        "base_unix_ns": timeline.base_ns,
        "left_out": list(timeline.left_out),
        "notes": list(timeline.notes),
    }
    return print_analysis(args, lambda: document, lambda: _lines(timeline, args.output, num_bytes, first, last))


def _steps(chosen: tuple[int | None, int | None], source: EventSource, round_number: int) -> tuple[int, int]:
    """Return the first and last step: the chosen ones, or else the newest two steps that were recorded in full.

    If only one end is chosen, the other end is the first or last of the steps that were recorded in full.
    """
    first, last = chosen
    if first is not None and last is not None:
        return first, last
    spans = source.read(Spans, spans_of_full_steps(round_number, first, last))
    known = full_steps(spans).tolist()
    if not known:
        raise DataError(f"no step was recorded span by span; there are {known_steps(source, round_number)}")
    if first is None and last is None:
        known = newest_steps(spans, _NUM_DEFAULT_STEPS).tolist()
    return (known[0] if first is None else first, known[-1] if last is None else last)


def _notes(place: str) -> Sequence[Note]:
    """Return users' notes on a run; empty if `place` is not a run."""
    try:
        run = run_at(place)
        return read_notes(RunDirectory(run)) if run else ()
    except OSError as error:
        print_note(f"users' notes are left out, because they cannot be read: {error.filename}: {error.strerror}")
        return ()


def _write(timeline: Timeline, path: Path, notes: Sequence[Note]) -> int:
    """Write the file atomically; return its size."""
    temporary = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        with open(temporary, "wb") as raw:
            if path.suffix == ".gz":
                # without time and name in the gzip header, the same events give the same bytes
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=5, mtime=0) as packed:
                    packed.writelines(piece.encode() for piece in chrome_trace(timeline, notes))
            else:
                raw.writelines(piece.encode() for piece in chrome_trace(timeline, notes))
        os.replace(temporary, path)
        return path.stat().st_size
    except OSError as error:
        with suppress(OSError):  # a read-only file system raises it even if there is no file
            temporary.unlink()
        raise DataError(f"--output={path}: {error.strerror or error}; name a file that can be written") from error


def _lines(timeline: Timeline, path: Path, num_bytes: int, first: int, last: int) -> list[str]:
    num_ranks = len({track.rank for track in timeline.tracks})
    lines = facts([
        ("written", f"{path}, {bytes_text(num_bytes)}"),
        ("steps", f"{first} to {last}"),
        ("ranks", f"{num_ranks} on {len(timeline.tracks)} tracks"),
        ("slices", f"{timeline.num_slices:,}, {len(timeline.flows):,} arrows from send to receive"),
        ("open it", "https://ui.perfetto.dev or chrome://tracing"),
    ])  # fmt: skip
    return lines + [f"note: {note}" for note in timeline.notes]
