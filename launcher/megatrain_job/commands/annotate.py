"""`megatrain annotate [JOB] --text TEXT`: put a note on a run, where charts, incidents and exports show it.

Notes are stored in the run directory, so a finished job can get notes too. Any user who may write to that directory may
write notes. The audit of actions records each note, like the notes that are written through the web page.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatrain.commands.argument_types import add_json, utf8_text, whole_number
from megatrain.commands.printing import print_json, print_lines
from megatrain.contracts.errors import DataError, NotFoundError, UnknownJobError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.record import to_plain
from megatrain.run_files.action_log import ActionLog
from megatrain_job.commands.job_location import add_job, job_location, named_job, opened_job, run_at
from megatrain_job.jobs.notes import Author, Note, NoteWriter, log_path, moment, place_text
from megatrain_job.jobs.send_request import requester
from megatrain_job.jobs.snapshot import read_job

SUMMARY = "put a note on a run, at a step or at a time"
_ROLE = "operator"
"""The role of any user who may write to the run directory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    add_job(parser)
    parser.add_argument(
        "--text", required=True, type=utf8_text, metavar="TEXT", help="3 to 500 characters; with --retract: why"
    )
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument(
        "--step", type=whole_number(0), metavar="N", help="step of the note (default: the current time)"
    )
    subject.add_argument(
        "--at", default="", type=utf8_text, metavar="TIME", help="time of the note, for example 2026-11-23T09:30:00Z"
    )
    subject.add_argument("--retract", default="", type=utf8_text, metavar="ID", help="retract this note")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the note, and print its id and its step or time; with --retract, retract a note, and print its id.

    Raises: JobLocationError, UsageError, NotFoundError, NoteRefusedError, CoordinationError, DataError.
    """
    directory = _run_directory(args)
    writer = NoteWriter(ActionLog(log_path(directory)))
    author = Author(requester(), _ROLE)
    try:
        if args.retract:
            note = writer.retract(args.retract, args.text, author)
        else:
            at_unix_s = moment(args.at) if args.at else None
            note = writer.add(args.text, author, step=args.step, at_unix_s=at_unix_s)
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
    """Return the directory of the chosen run, whether or not its job is running.

    Raises: JobLocationError, CoordinationError, NotFoundError.
    """
    run = run_at(named_job(args)) or job_location(args).run_directory
    if run is not None:
        return run
    with opened_job(args) as job:
        record = read_job(job.client, job.keys).record
    if record is None:
        raise UnknownJobError(f"job {job.keys.job!r}: etcd has no job of this name")
    directory = Path(record.run_directory)
    if not directory.is_dir():
        where = f"the run directory of job {job.keys.job!r} is not on this machine"
        raise NotFoundError(f"{directory}: {where}; write the note on one of its hosts, or in the dashboard")
    return directory
