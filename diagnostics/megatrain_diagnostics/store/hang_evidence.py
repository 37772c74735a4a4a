"""Reads the positions of the ranks of a job from files: black boxes, executors' evidence at a stall, and Flight
Recorder dumps.

A damaged or foreign file is reported and skipped. Black boxes of a live job are on its hosts; those of a broken round
are copied to <run>/incidents/round-N, beside the evidence of each host, <host>.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatrain.contracts.black_box.reader import BlackBox, read_black_box
from megatrain.contracts.black_box.values import State
from megatrain.contracts.errors import CoordinationError, DataError
from megatrain.contracts.files.bounded_files import read_below, read_bounded
from megatrain.contracts.layout import Layout
from megatrain.contracts.records.host_records import HangEvidence, RankEvidence
from megatrain.contracts.records.record import decode
from megatrain.formatting import count_text, names_text, problems_text
from megatrain.programs.processes import process_state
from megatrain.run_files.run_directory import RunDirectory
from megatrain_diagnostics.analysis.flight_recorder import FlightDump, parse_dump
from megatrain_diagnostics.analysis.hang import RankActivity, group_key, roster_groups
from megatrain_diagnostics.events.roster import GroupMembers, Roster
from megatrain_job.failures.hang import Position
from megatrain_job.failures.hang_activity import activity_of, reported_positions

_ROUND = re.compile(r"round-(\d+)$")
_RANK_AT_END = re.compile(r"(\d+)(\.json)?$")
_STOPPED = ("T", "t")
_MAX_DUMP_BYTES = 256 << 20
"""Size limit per rank: a Flight Recorder with 100,000 entries is smaller."""
_MAX_EVIDENCE_BYTES = 16 << 20
"""Size limit per host: evidence takes a few hundred bytes per rank and group."""


@dataclass(frozen=True, slots=True)
class FiledEvidence:
    """The content of the files of one round. `problems`: sentences about files that cannot be read or were left out."""

    round: int
    roster: Roster | None
    """None if no file has the layout."""
    activities: Mapping[int, RankActivity]
    groups: Mapping[str, tuple[int, ...]]
    silent: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    pids: Mapping[int, int] = field(default_factory=dict)
    """Rank -> pid, for ranks whose process is alive on this machine and writes the black box."""


def read_boxes(directory: Path, round_number: int | None = None, run_key: str = "") -> FiledEvidence:
    """Return the content of the black boxes in a directory for one round, the newest if `round_number` is None.

    `run_key`: RunDirectory.key; if boxes of this run exist, those of other runs are left out. Boxes of jobs other than
    the newest box's are always left out. Raises: DataError if there is no such black box.
    """
    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory")
    boxes: list[BlackBox] = []
    problems: list[str] = []
    paths = sorted(directory.glob("*.blackbox"))
    own = [path for path in paths if run_key and f".{run_key}." in path.name]
    if own and len(own) < len(paths):
        problems.append(
            f"{directory}: left out {count_text(len(paths) - len(own), 'black box', 'black boxes')} of other runs"
        )
    for path in own or paths:
        try:
            boxes.append(read_black_box(path))
        except DataError as error:
            problems.append(str(error))
    boxes.sort(key=lambda box: box.cursor)  # of a box and its copy, the one with more records is used: it comes last
    if not boxes:
        raise DataError(problems_text([f"{directory}: no black box that can be read", *problems], 4))
    newest = max(boxes, key=lambda box: (box.clock.unix_ns, box.identity.round))
    job = newest.identity.job
    others = sorted({box.identity.job for box in boxes} - {job})
    if others:
        problems.append(f"{directory}: black boxes of other jobs are left out: {names_text(others)}")
    boxes = [box for box in boxes if box.identity.job == job]
    number = max(box.identity.round for box in boxes) if round_number is None else round_number
    boxes = [box for box in boxes if box.identity.round == number and ".previous." not in box.path.name]
    if not boxes:
        raise DataError(f"{directory}: no black box of round {number} of job {job}")
    roster = _roster(number, boxes, problems)
    activities = {box.identity.rank: _activity(box) for box in boxes if box.identity.layout == roster.layout}
    pids = {box.identity.rank: box.identity.pid for box in boxes if _runs_here(box)}
    return FiledEvidence(number, roster, activities, roster_groups(roster), (), tuple(problems), pids)


def read_incident(run: RunDirectory, round_number: int | None = None) -> FiledEvidence | None:
    """Return the kept evidence of a broken round, the newest if `round_number` is None; None if nothing is kept.

    Executors' evidence replaces that of black boxes: it is from the time of the stall, while black boxes were copied
    when the processes were killed. Raises: DataError if files are kept, but none of them can be read.
    """
    found = kept_rounds(run)
    if round_number is None:
        round_number = max(found, default=None)
    directory = found.get(-1 if round_number is None else round_number)
    if directory is None or round_number is None:
        return None
    reports, problems = _read_evidence(directory)
    boxes: FiledEvidence | None = None
    try:
        boxes = read_boxes(directory)
        problems += boxes.problems
    except DataError as error:
        if not reports:
            raise
        problems.append(str(error))
    of_executors = executors_evidence(round_number, reports)
    activities = {**({} if boxes is None else boxes.activities), **of_executors.activities}
    groups = {**({} if boxes is None else boxes.groups), **of_executors.groups}
    roster = None if boxes is None else boxes.roster
    return FiledEvidence(round_number, roster, activities, groups, of_executors.silent, tuple(problems))


def kept_rounds(run: RunDirectory) -> dict[int, Path]:
    """Return round -> directory, for broken rounds with kept evidence."""
    return {int(match[1]): path for path in run.incidents.glob("round-*") if (match := _ROUND.search(path.name))}


def executors_evidence(round_number: int, reports: Sequence[HangEvidence]) -> FiledEvidence:
    """Return the executors' evidence of a stuck round, combined; it has no layout."""
    groups: dict[str, tuple[int, ...]] = {}
    for evidence in reports:
        groups.update(_reported_groups(evidence))
    activities = {
        rank_evidence.rank: _reported_activity(rank_evidence, is_after_halt=evidence.is_after_halt)
        for evidence in reports
        for rank_evidence in evidence.ranks
    }
    silent = tuple(sorted({rank for evidence in reports for rank in evidence.silent}))
    return FiledEvidence(round_number, None, activities, groups, silent)


def read_dumps(directory: Path) -> tuple[tuple[FlightDump, ...], tuple[str, ...]]:
    """Return the Flight Recorder dumps in a directory (file names end in the rank), and why others cannot be read.

    Raises: DataError if there is no readable dump.
    """
    dumps: dict[int, FlightDump] = {}
    problems: list[str] = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        match = _RANK_AT_END.search(path.name)
        if match is None or not path.is_file():
            continue
        try:
            dumps[int(match[1])] = parse_dump(
                read_below(directory, path.name, _MAX_DUMP_BYTES), int(match[1]), str(path)
            )
        except OSError as error:
            problems.append(f"{path}: cannot be read ({error.strerror})")
        except DataError as error:
            problems.append(str(error))
    if not dumps:
        raise DataError(problems_text([f"{directory}: no Flight Recorder dump that can be read", *problems], 4))
    return tuple(dumps[rank] for rank in sorted(dumps)), tuple(problems)


def _read_evidence(directory: Path) -> tuple[list[HangEvidence], list[str]]:
    reports: list[HangEvidence] = []
    problems: list[str] = []
    for path in sorted(directory.glob("*.json")):
        try:
            reports.append(decode(HangEvidence, read_bounded(path, _MAX_EVIDENCE_BYTES), str(path)))
        except OSError as error:
            problems.append(f"{path}: cannot be read ({error.strerror})")
        except CoordinationError as error:
            problems.append(str(error))
    return reports, problems


def _roster(round_number: int, boxes: Iterable[BlackBox], problems: list[str]) -> Roster:
    """Return the roster with the most frequent layout; boxes with another layout are added to `problems`."""
    by_layout: dict[Layout, list[BlackBox]] = {}
    for box in boxes:
        by_layout.setdefault(box.identity.layout, []).append(box)
    layout = max(by_layout, key=lambda candidate: len(by_layout[candidate]))
    problems += [
        f"{box.path}: has another layout than most black boxes"
        for other, bad in by_layout.items()
        if other != layout
        for box in bad
    ]
    groups = {
        (box.identity.rank, group.number): GroupMembers(group.name, group.first_rank, group.stride, group.num_ranks)
        for box in by_layout[layout]
        for group in box.groups.values()
    }
    hosts = {box.identity.rank: box.identity.host for box in by_layout[layout]}
    return Roster(round_number, layout, hosts, groups, by_layout[layout][0].identity.branch)


def _activity(box: BlackBox) -> RankActivity:
    progress = box.progress
    activity = activity_of(box.records, progress, box.groups)
    positions = {}
    for group in box.groups.values():
        if group.stride:
            awaited = None
            if activity.awaited_group is not None:
                awaited = activity.awaited if activity.awaited_group == group.number else 0
            positions[group_key(group)] = Position(activity.entered[group.number], group.left, awaited)
    return RankActivity(
        box.identity.rank,
        positions,
        in_flight=activity.in_flight,
        is_busy=activity.is_busy,
        step=-1 if progress.current_step is None else progress.current_step,
        phase=progress.phase.name.lower().replace("_", "-"),
        process_state=_state_here(box),
    )


def _state_here(box: BlackBox) -> str | None:
    """Return "T" or "t" if the box's process is on this machine and stopped, else None.

    A box may be a copy whose process has exited, so no other state is reported.
    """
    if not _runs_here(box):
        return None
    state = process_state(box.identity.pid)
    return state if state in _STOPPED else None


def _runs_here(box: BlackBox) -> bool:
    """Return whether a process with this pid has this file mapped: a pid alone may have been reused."""
    if box.state is not State.RUNNING:
        return False
    try:
        return str(box.path.resolve()) in Path(f"/proc/{box.identity.pid}/maps").read_text(errors="replace")
    except OSError:
        return False


def _reported_activity(rank_evidence: RankEvidence, *, is_after_halt: bool) -> RankActivity:
    # after a halt, a dead rank may have been killed by the halt; but a halt suspends no process (state T)
    state = rank_evidence.process_state if rank_evidence.process_state in _STOPPED or not is_after_halt else None
    return RankActivity(
        rank_evidence.rank,
        reported_positions(rank_evidence),
        rank_evidence.in_flight,
        rank_evidence.step,
        rank_evidence.phase,
        state,
        rank_evidence.is_busy,
    )


def _reported_groups(evidence: HangEvidence) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, shape in evidence.groups.items():
        if len(shape) == 3 and shape[2] and 0 < shape[1] <= 10_000_000:
            first, count, stride = shape
            found[name] = tuple(rank for rank in sorted(range(first, first + count * stride, stride)) if rank >= 0)
    return found
