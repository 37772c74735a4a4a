"""`megatrain incidents [JOB]`: what went wrong, what was done about it, and what it cost.

etcd has the newest incidents. Where it is gone with its job, the records in <run>/incidents say the same.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from megatrain.commands.argument_types import utf8_text
from megatrain.commands.job_place import PlaceError, add_job, opened_job, run_at, told_job
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
from megatrain.contracts.incident import Incident
from megatrain.contracts.record import to_plain
from megatrain.contracts.run_directory import RunDirectory
from megatrain.jobs.documents import incident_document
from megatrain.jobs.notes import Note, read_notes
from megatrain.jobs.recorded_incidents import read_incidents
from megatrain.jobs.snapshot import read_job
from megatrain_launcher.commands.incident_text import (
    ids_text,
    incident_lines,
    incidents_lines,
    matching,
    notes_lines,
)

SUMMARY = "what went wrong in a job, what was done about it, and what it cost"


@dataclass(frozen=True, slots=True)
class _Found:
    job: str
    incidents: tuple[Incident, ...]
    source: str
    run_directory: Path | None
    """Where it is in reach."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    add_job(parser, former_option="--id")
    parser.add_argument("--id", default="", type=utf8_text, metavar="ID",
                        help='an id, the beginning of one, or "last": tell all of this one')  # fmt: skip
    parser.add_argument("--json", action="store_true", dest="is_json", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print all incidents of a job, or one.

    Raises: PlaceError, UsageError, NotFoundError, CoordinationError, DataError.
    """
    found = _find(args)
    notes = _notes(found.run_directory)
    now_s = time.time()
    if not args.id:
        if args.is_json:
            documents = [incident_document(one) for one in reversed(found.incidents)]
            told = [to_plain(one) for one in reversed(notes)]
            print_json({"job": found.job, "source": found.source, "incidents": documents, "notes": told})
        else:
            print_lines([*incidents_lines(found.job, found.incidents, now_s), *notes_lines(notes, now_s)])
        return int(ExitCode.OK)
    incident = _one(found, args.id)
    of_it = [one for one in notes if one.is_of(incident, now_s)]
    if args.is_json:
        told = [to_plain(one) for one in of_it]
        print_json({
            "job": found.job, "source": found.source, "incident": incident_document(incident), "notes": told,
        })  # fmt: skip
    else:
        print_lines([*incident_lines(incident, now_s), *notes_lines(of_it, now_s)])
    return int(ExitCode.OK)


def _find(args: argparse.Namespace) -> _Found:
    """Return the incidents that etcd has, else those on disk. Raises: the error about etcd where there are none."""
    try:
        with opened_job(args) as job:
            snapshot = read_job(job.client, job.keys, num_incidents=0)
            incidents = (*snapshot.earlier_incidents, *snapshot.incidents)
            if not snapshot.exists and not incidents:
                raise UnknownJobError(f"job {snapshot.job!r}: etcd knows no job of this name")
    except CoordinationRefusedError:
        raise
    except (CoordinationError, PlaceError) as error:
        return _on_disk(told_job(args), error)
    for text in snapshot.unreadable:
        print_note(f"left out: {text}")
    record = snapshot.record
    return _Found(snapshot.job, incidents, "etcd", None if record is None else Path(record.run_directory))


def _notes(run: Path | None) -> tuple[Note, ...]:
    """Return what people wrote on a run; nothing where its directory is not in reach."""
    try:
        return () if run is None else read_notes(RunDirectory(run))
    except OSError as error:
        print_note(f"notes are left out: {error.filename}: {error.strerror}")
        return ()


def _on_disk(job: str, error: MegatrainError) -> _Found:
    run = run_at(job)
    if run is None or not (place := RunDirectory(run).incidents).is_dir():
        raise error
    found, problems = read_incidents(RunDirectory(run))
    for problem in problems:
        print_note(f"left out: {problem}")
    print_note(f"note: the job's etcd does not answer; this is from {place}")
    return _Found(str(run), found, str(place), run)


def _one(found: _Found, wanted: str) -> Incident:
    matches = matching(found.incidents, wanted)
    if len(matches) == 1:
        return matches[0]
    if not found.incidents:
        raise NotFoundError(f"{found.job} has no incident, so none that is {wanted!r}")
    if not matches:
        raise NotFoundError(f"{found.job} has no incident {wanted!r}; it has {ids_text(found.incidents)}")
    raise UsageError(f"{wanted!r} is the beginning of {len(matches)} incidents: {ids_text(matches)}; write more of it")
