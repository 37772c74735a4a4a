"""`megatrain incidents [JOB]`: causes, responses and lost time.

etcd has the newest incidents. If etcd stopped with its job, the records in <run>/incidents have the same content.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from megatrain.commands.argument_types import add_json, utf8_text
from megatrain.commands.printing import print_json, print_lines, print_note
from megatrain.contracts.errors import (
    CoordinationError,
    CoordinationRefusedError,
    MegatrainError,
    NotFoundError,
    UnknownJobError,
    UsageError,
)
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.incident import Incident
from megatrain.contracts.records.record import to_plain
from megatrain.run_files.incidents import read_incidents
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.commands.job_location import JobLocationError, add_job, named_job, opened_job, run_at
from megatrain_job.jobs.documents import incident_document
from megatrain_job.jobs.notes import Note, read_notes
from megatrain_job.jobs.snapshot import read_job
from megatrain_launcher.commands.incident_text import (
    ids_text,
    incident_lines,
    incidents_lines,
    matching,
    notes_lines,
)

SUMMARY = "show the incidents of a job: causes, responses and lost time"


@dataclass(frozen=True, slots=True)
class _IncidentList:
    job: str
    incidents: tuple[Incident, ...]
    source: str
    run_directory: Path | None
    """The run's directory, if it can be reached."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    add_job(parser)
    parser.add_argument("--id", default="", type=utf8_text, metavar="ID",
                        help='an id, the beginning of one, or "last": show all of this incident')  # fmt: skip
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print all incidents of a job, or one.

    Raises: JobLocationError, UsageError, NotFoundError, CoordinationError, DataError.
    """
    found = _find(args)
    notes = _notes(found.run_directory)
    now_s = time.time()
    if not args.id:
        if args.is_json:
            documents = [incident_document(incident) for incident in reversed(found.incidents)]
            note_documents = [to_plain(note) for note in reversed(notes)]
            print_json({"job": found.job, "source": found.source, "incidents": documents, "notes": note_documents})
        else:
            print_lines([*incidents_lines(found.job, found.incidents, now_s), *notes_lines(notes, now_s)])
        return int(ExitCode.OK)
    incident = _matching_incident(found, args.id)
    of_it = [note for note in notes if note.is_of(incident, now_s)]
    if args.is_json:
        note_documents = [to_plain(note) for note in of_it]
        print_json({
            "job": found.job, "source": found.source, "incident": incident_document(incident), "notes": note_documents,
        })  # fmt: skip
    else:
        print_lines([*incident_lines(incident, now_s), *notes_lines(of_it, now_s)])
    return int(ExitCode.OK)


def _find(args: argparse.Namespace) -> _IncidentList:
    """Return the incidents in etcd; if the job cannot be read there, those on disk.

    Raises: the error of etcd or of the job's location if there are none on disk.
    """
    try:
        with opened_job(args) as job:
            snapshot = read_job(job.client, job.keys, num_incidents=0)
            incidents = (*snapshot.earlier_incidents, *snapshot.incidents)
            if not snapshot.exists and not incidents:
                raise UnknownJobError(f"job {snapshot.job!r}: etcd has no job of this name")
    except CoordinationRefusedError:
        raise
    except (CoordinationError, JobLocationError) as error:
        return _on_disk(named_job(args), error)
    for text in snapshot.unreadable:
        print_note(f"left out: {text}")
    record = snapshot.record
    return _IncidentList(snapshot.job, incidents, "etcd", None if record is None else Path(record.run_directory))


def _notes(run: Path | None) -> tuple[Note, ...]:
    """Return people's notes on a run; empty if its directory cannot be reached."""
    try:
        return () if run is None else read_notes(RunDirectory(run))
    except OSError as error:
        print_note(f"notes are left out: {error.filename}: {error.strerror}")
        return ()


def _on_disk(job: str, error: MegatrainError) -> _IncidentList:
    run = run_at(job)
    if run is None or not (location := RunDirectory(run).incidents).is_dir():
        raise error
    found, problems = read_incidents(RunDirectory(run))
    for problem in problems:
        print_note(f"left out: {problem}")
    print_note(f"note: the job cannot be read from etcd; the incidents shown are from {location}")
    return _IncidentList(str(run), found, str(location), run)


def _matching_incident(found: _IncidentList, wanted: str) -> Incident:
    matches = matching(found.incidents, wanted)
    if len(matches) == 1:
        return matches[0]
    if not found.incidents:
        raise NotFoundError(f"{found.job} has no incidents, and thus no {wanted!r}")
    if not matches:
        raise NotFoundError(f"{found.job} has no incident {wanted!r}; it has {ids_text(found.incidents)}")
    raise UsageError(
        f"{wanted!r} is the beginning of {len(matches)} incidents: {ids_text(matches)}; give more of the id"
    )
