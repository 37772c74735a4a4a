"""Arguments that several commands of `megatrain diag` share: where the events are, and which of them to use."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatrain.commands.argument_types import Verbs, add_json, utf8_text, whole_number
from megatrain.commands.printing import print_note, print_result
from megatrain.contracts.errors import DataError, MegatrainError, NotFoundError, UsageError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.formatting import names_text
from megatrain.run_files.incidents import read_incidents
from megatrain.run_files.run_directory import RunDirectory
from megatrain_diagnostics.events.roster import newest_round
from megatrain_diagnostics.events.source import EventSource
from megatrain_diagnostics.events.tables import Ranks
from megatrain_job.failures.culprit import Culprit, recorded_culprit

RUN_HELP = (
    "a run directory, a job's name (runs/NAME), or any directory with segments of events (default: the only run below "
    "runs/)"
)
_MAX_NUMBERS = 1_000_000
"""Limit of the ranks in one argument: more are a mistake, and would fill memory."""


def add_analysis(
    verbs: Verbs,
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int],
    *options: Callable[[argparse.ArgumentParser], None],
) -> argparse.ArgumentParser:
    """Add a subcommand that reads the events of RUN, with these options, --round and --json; return its parser."""
    parser = verbs.add_parser(name, help=text, allow_abbrev=False)
    for add in (add_run, *options, add_round, add_json):
        add(parser)
    parser.set_defaults(run_verb=run)
    return parser


def print_analysis(
    args: argparse.Namespace, values: Callable[[], Mapping[str, Any]], lines: Callable[[], Sequence[str]]
) -> int:
    """Print a result as --json asks, then the problems of the events; return the exit code."""
    print_result(values, lines, is_json=args.is_json)
    report_problems(args)
    return int(ExitCode.OK)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument [RUN]; args.place is where the events are."""
    parser.add_argument("place", nargs="?", default="", type=utf8_text, metavar="RUN", help=RUN_HELP)


def add_round(parser: argparse.ArgumentParser) -> None:
    """Add --round, which `chosen_round` uses."""
    parser.add_argument(
        "--round",
        type=whole_number(0),
        default=None,
        metavar="N",
        help="which round of the job (default: the newest)",
    )


def add_steps(parser: argparse.ArgumentParser) -> None:
    """Add --steps; args.steps is (first, last) as in Where, None for an open end."""
    parser.add_argument(
        "--steps",
        type=step_range,
        default=(None, None),
        metavar="FIRST:LAST",
        help="only these steps, both ends included; either end may be omitted, and a single number is one step",
    )


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add --ranks; args.ranks is a tuple as in Where; None: all."""
    parser.add_argument(
        "--ranks",
        type=rank_list,
        default=None,
        metavar="RANKS",
        help="only these ranks: numbers and FIRST:LAST, both ends included, separated by commas (default: all)",
    )


def step_range(text: str) -> tuple[int | None, int | None]:
    """Parse "10:20", "10:", ":20" or "15"."""
    number = whole_number(0, 2**31 - 1)
    first, has_colon, last = text.partition(":")
    if not has_colon:
        return number(text), number(text)
    bounds = (number(first) if first else None, number(last) if last else None)
    if bounds[0] is not None and bounds[1] is not None and bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins")
    return bounds


def rank_list(text: str) -> tuple[int, ...]:
    """Parse "0:7,16"."""
    number = whole_number(0, 2**31 - 1)
    ranks: set[int] = set()
    for part in text.split(","):
        first_text, has_colon, last_text = part.strip().partition(":")
        first = number(first_text)
        last = number(last_text) if has_colon else first
        if first > last:
            raise argparse.ArgumentTypeError(f"{part!r} ends before it begins")
        if last - first + len(ranks) >= _MAX_NUMBERS:
            raise argparse.ArgumentTypeError(f"{text!r} names more than {_MAX_NUMBERS:,} ranks")
        ranks.update(range(first, last + 1))
    return tuple(sorted(ranks))


def check_run(args: argparse.Namespace) -> None:
    """If the command line names no run, choose the only one below runs/. Raises: UsageError, NotFoundError."""
    from megatrain_job.commands.job_location import RUNS  # loaded late, because only some commands need it

    if args.place:
        return
    found = sorted(str(path.parent) for path in RUNS.glob("*/events"))
    if not found:
        raise NotFoundError(f"no run is named, and there is none below {RUNS}/; name a run or a directory of segments")
    if len(found) > 1:
        raise UsageError(f"no run is named, and there are {names_text(found)}; name one of them")
    args.place = found[0]


def events_directory(text: str) -> Path:
    """Return the directory of segments for RUN. Raises: NotFoundError if there is no such run or directory."""
    # loaded late, because only some commands need it
    from megatrain_job.commands.job_location import RUNS, run_at

    found = run_at(text)
    if found is None:
        raise NotFoundError(
            f"{text!r}: no such directory, nor a run {RUNS / text}; name a run or a directory of segments"
        )
    run = RunDirectory(found)
    return run.events if run.events.is_dir() else found


def open_source(args: argparse.Namespace) -> EventSource:
    """Open the events of RUN. Raises: UsageError, NotFoundError; DataError if there are none."""
    check_run(args)
    try:
        # loaded late: DuckDB takes a tenth of a second to load, and some commands do not need it
        from megatrain_diagnostics.store.reader import StoredEvents
    except ModuleNotFoundError as error:
        raise DataError(
            f"reading events needs {error.name}, which is not installed: pip install 'megatrain[diagnostics]'"
        ) from error

    source = StoredEvents(events_directory(args.place))
    source.check_not_empty()
    args.source, args.num_reported_problems = source, 0
    return source


def chosen_round(args: argparse.Namespace, source: EventSource) -> int:
    """Return --round, or the newest round. Raises: NotFoundError; DataError if there are no rounds."""
    ranks = source.read(Ranks)
    known = sorted({int(number) for number in ranks.round})
    if not known:
        raise DataError(
            f"{args.place}: no rank has sent anything: no segments of the table ranks; is this a run of a job?"
        )
    chosen: int | None = args.round
    if chosen is None:
        return newest_round(ranks)
    if chosen not in known:
        raise NotFoundError(f"--round={chosen}: the rounds of {args.place} are {', '.join(map(str, known))}")
    return chosen


def incident_culprit(args: argparse.Namespace, round_number: int) -> Culprit | None:
    """Return the culprit in the incident of a round of RUN; None if there is no incident."""
    from megatrain_job.commands.job_location import run_at

    run = run_at(args.place)
    return None if run is None else recorded_culprit(read_incidents(RunDirectory(run))[0], round_number)


def report_problems(args: argparse.Namespace) -> None:
    """Print to stderr the problems of the opened events that were not printed yet."""
    source: EventSource | None = getattr(args, "source", None)
    if source is not None:
        problems = source.problems()
        for problem in problems[args.num_reported_problems :]:
            print_note(problem)
        args.num_reported_problems = len(problems)


@contextmanager
def problems_on_error(args: argparse.Namespace) -> Iterator[None]:
    """If the block raises an error, first print the problems of the events, which are often its reason."""
    try:
        yield
    except MegatrainError:
        report_problems(args)
        raise
