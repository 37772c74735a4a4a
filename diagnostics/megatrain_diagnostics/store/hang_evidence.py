"""Where the ranks of a job stood, read from files: black boxes, what executors wrote at a stall, Flight Recorder dumps.

A file that is damaged or foreign is reported and left out; the others count. Black boxes of a live job lie on its
hosts; those of a broken round are kept in <run>/incidents/round-N, beside each host's evidence, <host>.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatrain.contracts.black_box import BlackBox, read_black_box
from megatrain.contracts.black_box_values import RecordFlag, State
from megatrain.contracts.bounded_files import read_below, read_bounded
from megatrain.contracts.errors import CoordinationError, DataError
from megatrain.contracts.host_records import HangEvidence, RankEvidence
from megatrain.contracts.layout import Layout
from megatrain.contracts.record import decode
from megatrain.contracts.run_directory import RunDirectory
from megatrain.failures.hang import Position, is_own_work
from megatrain_diagnostics.analysis.flight_recorder import FlightDump, parse_dump
from megatrain_diagnostics.analysis.hang import RankStanding, group_key
from megatrain_diagnostics.events.roster import GroupMembers, Roster

_ROUND = re.compile(r"round-(\d+)$")
_RANK_AT_END = re.compile(r"(\d+)(\.json)?$")
_STOPPED = ("T", "t")
_MOST_DUMP_BYTES = 256 << 20
"""Of one rank: a Flight Recorder with 100,000 entries has less."""
_MOST_EVIDENCE_BYTES = 16 << 20
"""Of one host: some hundred bytes a rank and group."""


@dataclass(frozen=True, slots=True)
class FiledEvidence:
    """What the files of one round say. `problems`: what could not be read, a sentence each."""

    round: int
    roster: Roster | None
    """None where no file tells the layout."""
    standings: Mapping[int, RankStanding]
    groups: Mapping[str, tuple[int, ...]]
    silent: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    pids: Mapping[int, int] = field(default_factory=dict)
    """By rank, the processes of this machine that live and write these black boxes."""


def read_boxes(directory: Path, round_number: int | None = None, run_key: str = "") -> FiledEvidence:
    """Return what the black boxes of a directory say, of one round, the newest where None is named.

    `run_key`: RunDirectory.key; where boxes of this run are there, those of other runs and jobs are left out.
    Raises: DataError where there is no such black box.
    """
    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory")
    boxes: list[BlackBox] = []
    problems: list[str] = []
    paths = sorted(directory.glob("*.blackbox"))
    own = [path for path in paths if run_key and f".{run_key}." in path.name]
    if own and len(own) < len(paths):
        problems.append(f"{directory}: {len(paths) - len(own)} black boxes of other runs are left out")
    for path in own or paths:
        try:
            boxes.append(read_black_box(path))
        except DataError as error:
            problems.append(str(error))
    boxes.sort(key=lambda box: box.cursor)  # of a box and its copy the one that went on counts
    if not boxes:
        raise DataError("; ".join([f"{directory}: no black box that can be read", *problems[:3]]))
    newest = max(boxes, key=lambda box: (box.clock.unix_ns, box.identity.round))
    job = newest.identity.job
    others = sorted({box.identity.job for box in boxes} - {job})
    if others:
        problems.append(f"{directory}: black boxes of other jobs are left out: {', '.join(others[:8])}")
    boxes = [box for box in boxes if box.identity.job == job]
    number = max(box.identity.round for box in boxes) if round_number is None else round_number
    boxes = [box for box in boxes if box.identity.round == number and ".previous." not in box.path.name]
    if not boxes:
        raise DataError(f"{directory}: no black box of round {number} of job {job}")
    roster = _roster(number, boxes, problems)
    standings = {box.identity.rank: _standing(box) for box in boxes if box.identity.layout == roster.layout}
    groups = _groups(boxes, roster.layout.world_size)
    pids = {box.identity.rank: box.identity.pid for box in boxes if _lives_here(box)}
    return FiledEvidence(number, roster, standings, groups, (), tuple(problems), pids)


def read_incident(run: RunDirectory, round_number: int | None = None) -> FiledEvidence | None:
    """Return what is kept of a broken round, the newest where None is named; None where nothing is.

    What executors wrote at the stall comes before black boxes, which were copied when the processes were killed.
    """
    found = kept_rounds(run)
    if round_number is None:
        round_number = max(found, default=None)
    directory = found.get(-1 if round_number is None else round_number)
    if directory is None or round_number is None:
        return None
    told, problems = _told(directory)
    boxes: FiledEvidence | None = None
    try:
        boxes = read_boxes(directory)
        problems += boxes.problems
    except DataError as error:
        if not told:
            raise
        problems.append(str(error))
    of_told = told_evidence(round_number, told)
    standings = {**({} if boxes is None else boxes.standings), **of_told.standings}
    groups = {**({} if boxes is None else boxes.groups), **of_told.groups}
    roster = None if boxes is None else boxes.roster
    return FiledEvidence(round_number, roster, standings, groups, of_told.silent, tuple(problems))


def kept_rounds(run: RunDirectory) -> dict[int, Path]:
    """Return the directories of the broken rounds of which something is kept."""
    return {int(match[1]): path for path in run.incidents.glob("round-*") if (match := _ROUND.search(path.name))}


def told_evidence(round_number: int, told: Sequence[HangEvidence]) -> FiledEvidence:
    """Return the executors' evidence of a stuck round, as etcd holds it. No file has the layout."""
    groups: dict[str, tuple[int, ...]] = {}
    for evidence in told:
        groups.update(_groups_told(evidence))
    standings = {
        one.rank: _standing_told(one, is_after_halt=evidence.is_after_halt)
        for evidence in told
        for one in evidence.ranks
    }
    silent = tuple(sorted({rank for evidence in told for rank in evidence.silent}))
    return FiledEvidence(round_number, None, standings, groups, silent)


def read_dumps(directory: Path) -> tuple[tuple[FlightDump, ...], tuple[str, ...]]:
    """Return the Flight Recorder dumps of a directory, whose names end in the rank, and what could not be read.

    Raises: DataError where there is none.
    """
    dumps: dict[int, FlightDump] = {}
    problems: list[str] = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        match = _RANK_AT_END.search(path.name)
        if match is None or not path.is_file():
            continue
        try:
            dumps[int(match[1])] = parse_dump(
                read_below(directory, path.name, _MOST_DUMP_BYTES), int(match[1]), str(path)
            )
        except OSError as error:
            problems.append(f"{path}: cannot be read ({error.strerror})")
        except DataError as error:
            problems.append(str(error))
    if not dumps:
        raise DataError("; ".join([f"{directory}: no Flight Recorder dump that can be read", *problems[:3]]))
    return tuple(dumps[rank] for rank in sorted(dumps)), tuple(problems)


def _told(directory: Path) -> tuple[list[HangEvidence], list[str]]:
    told: list[HangEvidence] = []
    problems: list[str] = []
    for path in sorted(directory.glob("*.json")):
        try:
            told.append(decode(HangEvidence, read_bounded(path, _MOST_EVIDENCE_BYTES), str(path)))
        except OSError as error:
            problems.append(f"{path}: cannot be read ({error.strerror})")
        except CoordinationError as error:
            problems.append(str(error))
    return told, problems


def _roster(round_number: int, boxes: Iterable[BlackBox], problems: list[str]) -> Roster:
    """Return who is who. Of boxes that tell of different layouts the commonest counts; the others are problems."""
    by_layout: dict[Layout, list[BlackBox]] = {}
    for box in boxes:
        by_layout.setdefault(box.identity.layout, []).append(box)
    layout = max(by_layout, key=lambda one: len(by_layout[one]))
    problems += [f"{box.path}: of another layout" for other, bad in by_layout.items() if other != layout for box in bad]
    groups = {
        (box.identity.rank, one.number): GroupMembers(one.name, one.first_rank, one.stride, one.num_ranks)
        for box in by_layout[layout]
        for one in box.groups.values()
    }
    hosts = {box.identity.rank: box.identity.host for box in by_layout[layout]}
    return Roster(round_number, layout, hosts, groups, by_layout[layout][0].identity.branch)


def _standing(box: BlackBox) -> RankStanding:
    progress = box.progress
    positions = {}
    for one in box.groups.values():
        if one.stride:
            awaited = None
            if progress.awaited_group:
                awaited = progress.awaited_place if progress.awaited_group == one.number else 0
            key = group_key(one.name, one.first_rank, one.num_ranks, one.stride)
            positions[key] = Position(one.entered, one.left, awaited)
    held = [record for record in box.in_flight if not record.flags & RecordFlag.HOST_DONE] or box.in_flight
    in_flight = held[-1].operation if held else ""
    return RankStanding(
        box.identity.rank,
        positions,
        in_flight=in_flight,
        is_busy=is_own_work(in_flight),
        step=-1 if progress.current_step is None else progress.current_step,
        phase=progress.phase.name.lower().replace("_", "-"),
        process_state=_state_here(box),
    )


def _state_here(box: BlackBox) -> str | None:
    """Return T for a process of this machine that is stopped; everything else is no news: copies outlive processes."""
    if not _lives_here(box):
        return None
    try:
        stat = Path(f"/proc/{box.identity.pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state = stat.rpartition(")")[2].split()[0]
    return state if state in _STOPPED else None


def _lives_here(box: BlackBox) -> bool:
    """Whether the process that writes this very file is one of this machine: numbers of processes come again."""
    if box.state is not State.RUNNING:
        return False
    try:
        return str(box.path.resolve()) in Path(f"/proc/{box.identity.pid}/maps").read_text(errors="replace")
    except OSError:
        return False


def _groups(boxes: Iterable[BlackBox], world_size: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for box in boxes:
        for one in box.groups.values():
            key = group_key(one.name, one.first_rank, one.num_ranks, one.stride)
            if one.stride and key not in found and one.num_ranks <= world_size:
                found[key] = tuple(rank for rank in sorted(one.ranks) if 0 <= rank < world_size)
    return found


def _standing_told(one: RankEvidence, *, is_after_halt: bool) -> RankStanding:
    def awaited(group: str) -> int | None:
        if not one.awaited_group:
            return None
        return one.awaited if one.awaited_group == group else 0

    positions = {group: Position(at.entered, at.left, awaited(group)) for group, at in one.positions.items()}
    # a rank that is dead after the halt was killed by it, or died with others; the halt stops no process
    state = one.process_state if one.process_state in _STOPPED or not is_after_halt else None
    return RankStanding(one.rank, positions, one.in_flight, one.step, one.phase, state, one.is_busy)


def _groups_told(evidence: HangEvidence) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, told in evidence.groups.items():
        if len(told) == 3 and told[2] and 0 < told[1] <= 10_000_000:
            first, count, stride = told
            found[name] = tuple(rank for rank in sorted(range(first, first + count * stride, stride)) if rank >= 0)
    return found
