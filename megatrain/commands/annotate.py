"""`megatrain annotate [JOB] --text TEXT`: put a note on a run, where charts, incidents and exports show it.

Notes lie in the run directory, so that of a job that is over takes them too. Who may write there may write notes; each
is in the audit of actions, like those that are written through the page.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatrain.commands.argument_types import utf8_text, whole_number
from megatrain.commands.job_place import add_job, job_place, opened_job, run_at, told_job
from megatrain.commands.printing import print_json, print_lines
from megatrain.contracts.action_log import ActionLog
from megatrain.contracts.errors import DataError, NotFoundError, UnknownJobError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.record import to_plain
from megatrain.jobs.asking import asker
from megatrain.jobs.notes import Author, Note, NoteBook, log_path, moment, place_text
from megatrain.jobs.snapshot import read_job

SUMMARY = "put a note on a run, at a step or at a time"
_ROLE = "operator"
"""Whoever may write to the run directory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    add_job(parser)
    parser.add_argument(
        "--text", required=True, type=utf8_text, metavar="TEXT", help="3 to 500 characters; with --retract: why"
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--step", type=whole_number(0), metavar="N", help="where it stands (default: at this moment)")
    place.add_argument("--at", default="", type=utf8_text, metavar="TIME", help="as 2026-11-23T09:30:00Z")
    place.add_argument("--retract", default="", type=utf8_text, metavar="ID", help="take this note back")
    parser.add_argument("--json", action="store_true", dest="is_json", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Write the note, and say where.

    Raises: PlaceError, UsageError, NotFoundError, NoteRefusedError, CoordinationError, DataError.
    """
    directory = _run_directory(args)
    book = NoteBook(ActionLog(log_path(directory)))
    author = Author(asker(), _ROLE)
    try:
        if args.retract:
            note = book.retract(args.retract, args.text, author)
        else:
            at_unix_s = moment(args.at) if args.at else None
            note = book.add(args.text, author, step=args.step, at_unix_s=at_unix_s)
    except OSError as error:
        path = log_path(directory)
        raise DataError(f"{path}: the note cannot be written: {error.strerror or error}") from error
    _print(directory, note, is_json=args.is_json)
    return int(ExitCode.OK)


def _print(directory: Path, note: Note, *, is_json: bool) -> None:
    if is_json:
        print_json({"run_directory": str(directory), "note": to_plain(note)})
    elif note.is_retracted:
        print_lines([f"{directory}: note {note.note_id} is retracted"])
    else:
        print_lines([f"{directory}: note {note.note_id} at {place_text(note)}"])


def _run_directory(args: argparse.Namespace) -> Path:
    """Return the run that is meant, whether or not its job runs.

    Raises: PlaceError, CoordinationError, NotFoundError.
    """
    run = run_at(told_job(args)) or job_place(args).run_directory
    if run is not None:
        return run
    with opened_job(args) as job:
        record = read_job(job.client, job.keys).record
    if record is None:
        raise UnknownJobError(f"job {job.keys.job!r}: etcd knows no job of this name")
    directory = Path(record.run_directory)
    if not directory.is_dir():
        where = f"the run directory of job {job.keys.job!r} is not on this machine"
        raise NotFoundError(f"{directory}: {where}; write the note on one of its hosts, or through the page")
    return directory
