"""`megatrain diag hang RUN`: show which ranks never entered which collective, and the state of all ranks of a job.

For a run the command reads the kept files of the newest broken round, or else the events. With --blackbox it reads the
black boxes of a job that hangs now, on one of its hosts. With --flight-recorder it reads JSON dumps of torch's Flight
Recorder, in files with names that end in the rank. Stack dumps in the events are grouped: a rank with a stack that
differs from most others is an outlier.
"""

from __future__ import annotations

import argparse
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatrain.commands.argument_types import Verbs, utf8_text
from megatrain.commands.printing import facts, print_note, print_result, table
from megatrain.contracts.errors import DataError, NotFoundError, UsageError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.layout import Layout
from megatrain.formatting import count_text, ranks_text
from megatrain.run_files.run_directory import RunDirectory, own_box_directory
from megatrain_diagnostics.analysis.flight_recorder import disagreements, flight_activities, flight_groups, known_ranks
from megatrain_diagnostics.analysis.hang import find_hang
from megatrain_diagnostics.analysis.hang_grid import LEGEND, grid_lines
from megatrain_diagnostics.analysis.stack_clusters import StackFinding, find_outliers, newest_main_stacks
from megatrain_diagnostics.commands.arguments import (
    add_analysis,
    check_run,
    chosen_round,
    events_directory,
    incident_culprit,
    open_source,
)
from megatrain_diagnostics.events.roster import Roster, read_roster
from megatrain_diagnostics.events.source import EventSource
from megatrain_diagnostics.store.hang_answer import (
    HangAnswer,
    answer_of_evidence,
    answer_of_spans,
    evidence_roster,
    roster_of_events,
    stacks_of,
)
from megatrain_diagnostics.store.hang_evidence import FiledEvidence, read_boxes, read_dumps, read_incident
from megatrain_diagnostics.streamer.stacks import DumpTarget, collect_stacks
from megatrain_job.commands.job_location import run_at

_MAX_ROWS = 16
_MAX_FRAMES = 4


def add_verb(verbs: Verbs) -> None:
    """Add the subcommand `hang`."""
    parser = add_analysis(verbs, "hang", "which ranks block a hung job", run)
    parser.description = __doc__
    parser.add_argument(
        "--blackbox",
        type=utf8_text,
        default="",
        metavar="DIR",
        help="directory of black boxes, such as /dev/shm of a job's hosts",
    )
    parser.add_argument(
        "--flight-recorder",
        type=utf8_text,
        default="",
        metavar="DIR",
        help="directory of JSON dumps of torch's Flight Recorder, one per rank; file names end in the rank",
    )
    parser.add_argument(
        "--stacks",
        action="store_true",
        dest="has_stacks",
        help="with --blackbox: also dump the stacks of the ranks that run on this machine now",
    )


def run(args: argparse.Namespace) -> int:
    """Print which ranks hold up the job.

    Raises: DataError if there is no evidence about the job; UsageError; NotFoundError if there is no such run.
    """
    answer = _answer(args)
    for problem in () if args.is_json else answer.problems:
        print_note(problem)
    print_result(lambda: _as_json(answer), lambda: _as_text(answer), is_json=args.is_json)
    return int(ExitCode.OK)


def _answer(args: argparse.Namespace) -> HangAnswer:
    if args.has_stacks and not args.blackbox:
        raise UsageError("--stacks: name the directory of this machine's black boxes with --blackbox")
    if args.flight_recorder:
        return _of_dumps(Path(args.flight_recorder), args)
    if not args.blackbox:
        check_run(args)
        events_directory(args.place)
    source = _source(args)
    run_directory = run_at(args.place)
    filed: FiledEvidence | None = None
    if args.blackbox:
        run_key = "" if run_directory is None else RunDirectory(run_directory).key
        filed = read_boxes(_box_directory(Path(args.blackbox)), args.round, run_key)
    elif run_directory is not None:
        filed = read_incident(RunDirectory(run_directory), args.round)
    if filed is not None:
        place = f"black boxes in {args.blackbox}" if args.blackbox else f"files kept of round {filed.round}"
        stacks = _stacks_now(filed, evidence_roster(filed, source)) if args.has_stacks else None
        return answer_of_evidence(filed, place, source, incident_culprit(args, filed.round), stacks)
    if source is None:
        raise DataError(
            f"{args.place} has neither events nor files of a broken round; name a directory of black boxes "
            "with --blackbox"
        )
    number = chosen_round(args, source)
    return answer_of_spans(source, read_roster(source, number), incident_culprit(args, number))


def _box_directory(named: Path) -> Path:
    """Return the directory of the black boxes; `named` is this directory, or telemetry.black_box_directory above it."""
    own = own_box_directory(named)
    return own if own.is_dir() else named


def _of_dumps(directory: Path, args: argparse.Namespace) -> HangAnswer:
    dumps, problems = read_dumps(directory)
    source = _source(args)
    number = args.round
    roster = None if source is None else roster_of_events(source, number)
    if roster is None:
        num_ranks, is_certain = known_ranks(dumps)
        roster = Roster(0, Layout(dp_size=num_ranks), {}, {})
        if not is_certain:
            unseen = f"ranks above {num_ranks - 1} without a dump are not counted"
            problems = (*problems, f"the dumps do not show how many ranks the job had: {unseen}")
    finding = find_hang(flight_activities(dumps), flight_groups(dumps, roster.layout.world_size), roster)
    place = f"Flight Recorder dumps in {directory}"
    return HangAnswer(place, roster, finding, stacks_of(source, roster), disagreements(dumps), problems)


def _source(args: argparse.Namespace) -> EventSource | None:
    try:
        return open_source(args)
    except (DataError, NotFoundError, UsageError):
        return None


def _stacks_now(filed: FiledEvidence, roster: Roster) -> StackFinding:
    """Dump and cluster the stacks of the ranks on this machine; ranks on other machines are not missing."""
    targets = [DumpTarget(rank, filed.round, pid) for rank, pid in sorted(filed.pids.items())]
    if not targets:
        raise DataError("--stacks: none of these black boxes belongs to a process that runs on this machine")
    stacks = collect_stacks(targets, socket.gethostname(), 1, time.time_ns)
    return find_outliers(newest_main_stacks(stacks, filed.round), roster, [target.rank for target in targets])


def _as_json(answer: HangAnswer) -> dict[str, Any]:
    report, culprit, layout = answer.finding.report, answer.finding.culprit, answer.roster.layout
    return {
        "source": answer.source,
        "round": answer.roster.round,
        "layout": layout.sizes,
        "confidence": culprit.confidence,
        "reason": culprit.reason,
        "incident": culprit.incident,
        "suspects": [asdict(suspect) for suspect in answer.finding.suspects],
        "hosts": answer.finding.hosts,
        "missing": [asdict(missing) for missing in report.missing],
        "silent": sorted(answer.finding.silent),
        "in_flight": {str(rank): name for rank, name in answer.finding.in_flight.items()},
        "stacks": {
            "clusters": [asdict(cluster) for cluster in answer.stacks.clusters],
            "outliers": answer.stacks.outliers,
            "undumped": answer.stacks.undumped,
            "shared": None if answer.stacks.shared is None else asdict(answer.stacks.shared),
            "reason": answer.stacks.reason,
        },
        "disagreements": [asdict(disagreement) for disagreement in answer.disagreements],
        "grid": {"letters": answer.letters, "legend": LEGEND, "lines": grid_lines(layout, answer.letters)},
        "problems": answer.problems,
    }


def _as_text(answer: HangAnswer) -> list[str]:
    report, culprit, roster = answer.finding.report, answer.finding.culprit, answer.roster
    lines = facts(
        [
            ("from", answer.source),
            ("round", f"{roster.round}, {roster.layout}"),
            ("culprit", culprit.text or "none"),
            ("confidence", culprit.confidence or "-"),
            ("because", culprit.reason),
            *([("incident", culprit.incident)] if culprit.incident else []),
        ]
    )
    if answer.finding.suspects:
        axes = roster.layout.axes
        rows = [("rank", "host", *axes, "step", "in", "evidence")]
        rows += [
            (
                str(suspect.rank),
                suspect.host,
                *(str(suspect.place[axis]) for axis in axes),
                str(suspect.step),
                suspect.doing,
                suspect.evidence,
            )
            for suspect in answer.finding.suspects[:_MAX_ROWS]
        ]
        lines += [
            "",
            *table(rows, left=(1, len(axes) + 3, len(axes) + 4)),
            *_more(len(answer.finding.suspects) - _MAX_ROWS, "suspects"),
        ]
    if report.missing:
        lines += ["", "collectives in which ranks wait:"]
        for entry in report.missing[:_MAX_ROWS]:
            held = [
                ("never entered by", entry.absent),
                ("silent", entry.silent),
                ("not waited for by", entry.not_waiting),
            ]
            text = "; ".join(f"{word} {ranks_text(ranks)}" for word, ranks in held if ranks)
            text = text or "all ranks are in it"
            lines.append(f"  {entry.sequence} of {entry.group}: waited for by {ranks_text(entry.waiting)}; {text}")
        lines += _more(len(report.missing) - _MAX_ROWS, "collectives")
    for one in answer.disagreements:
        lines.append(f"  {one.sequence} of {one.group} differs between the ranks:")
        lines += [f"    {call}: {ranks_text(ranks)}" for call, ranks in one.calls.items()]
    return [*lines, *_stack_lines(answer.stacks), "", LEGEND, *grid_lines(roster.layout, answer.letters)]


def _stack_lines(stacks: StackFinding) -> list[str]:
    if not stacks.clusters:
        return []
    lines = ["", f"stacks: {stacks.reason}"]
    for cluster in stacks.clusters[:_MAX_ROWS]:
        kind = "waiting" if cluster.is_waiting else "not waiting"
        frames = " < ".join(cluster.frames[-_MAX_FRAMES:][::-1])
        lines.append(f"  {len(cluster.ranks)} {kind} ({ranks_text(cluster.ranks)}): {frames}")
    lines += _more(len(stacks.clusters) - _MAX_ROWS, "kinds of stacks")
    if stacks.shared is not None:
        shared = f"{stacks.shared.name} ({count_text(len(stacks.shared.ranks), 'rank')})"
        lines.append(f"  the outliers ({ranks_text(stacks.outliers)}) share {shared}")
    elif stacks.outliers:
        lines.append(f"  the outliers ({ranks_text(stacks.outliers)}) have no common group except the whole job")
    return lines


def _more(number: int, what: str) -> list[str]:
    return [f"  {what} not shown: {number}"] if number > 0 else []
