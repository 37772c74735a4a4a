"""Removes the oldest files of events when they exceed a limit of hours or bytes.

The tables of ranks and groups are sent once per round. They are small, and kept as long as any other row of the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.events.tables import TABLES, Groups, Ranks
from megatrain_diagnostics.store.compaction import hour_directories
from megatrain_diagnostics.store.segments import DAMAGED_SUFFIX, SUFFIX, parse_name, read_footer

_ROSTERS = (Ranks, Groups)


@dataclass(frozen=True, slots=True)
class Retention:
    """The limits [diagnostics] retention_hours and retention_gb."""

    hours: float
    num_bytes: float


@dataclass(frozen=True, slots=True)
class _OldFile:
    end_ns: int
    first: int
    path: Path
    num_bytes: int


def expire(directory: Path, retention: Retention, now_ns: int) -> int:
    """Remove files beyond the limits from a directory that only this process writes; return the bytes that are left."""
    files = [file for kind in TABLES if kind not in _ROSTERS for file in _files(directory / kind.NAME)]
    rosters = [file for kind in _ROSTERS for file in _files(directory / kind.NAME)]
    files.sort(key=lambda file: (file.end_ns, file.first))
    oldest_ns = now_ns - int(retention.hours * 3600e9)
    excess = sum(file.num_bytes for file in [*files, *rosters]) - retention.num_bytes
    removed: list[_OldFile] = []
    for file in files:
        if file.end_ns >= oldest_ns and excess <= 0:
            break
        removed.append(file)
        excess -= file.num_bytes
    old_rosters = [file for file in rosters if file.end_ns < oldest_ns]
    if old_rosters:
        removed += _not_needed(old_rosters, files[len(removed) :], rosters)
    for file in removed:
        file.path.unlink(missing_ok=True)
    _remove_empty_directories(removed, directory)
    return sum(file.num_bytes for file in [*files, *rosters]) - sum(file.num_bytes for file in removed)


def _files(table_directory: Path) -> list[_OldFile]:
    found = []
    for hour, end_ns in hour_directories(table_directory):
        for path in hour.iterdir():
            name = parse_name(path.name.removesuffix(".damaged"))
            if name is not None and path.name.endswith((SUFFIX, DAMAGED_SUFFIX)):
                with suppress(FileNotFoundError):
                    found.append(_OldFile(end_ns, name.first, path, path.stat().st_size))
    return found


def _not_needed(old: Sequence[_OldFile], kept: Sequence[_OldFile], rosters: Sequence[_OldFile]) -> list[_OldFile]:
    """Return the old roster files whose rounds all have no events left and are older than the newest round."""
    first_hours: dict[Path, int] = {}
    for file in kept:
        table = file.path.parent.parent.parent
        first_hours[table] = min(file.end_ns, first_hours.get(table, file.end_ns))
    # round numbers only grow, so the oldest kept round of a table is in its first hour
    oldest = [file for file in kept if file.end_ns == first_hours[file.path.parent.parent.parent]]
    needed = [bounds[0] for file in oldest if (bounds := _rounds(file.path))]
    newest = [bounds[1] for file in rosters if (bounds := _rounds(file.path))]
    least = min([*needed, max(newest, default=0)])
    return [file for file in old if (bounds := _rounds(file.path)) is None or bounds[1] < least]


def _rounds(path: Path) -> tuple[int, int] | None:
    try:
        return read_footer(path).bounds.get("round")
    except (DataError, FileNotFoundError):
        return None


def _remove_empty_directories(removed: Sequence[_OldFile], directory: Path) -> None:
    for hour in {file.path.parent for file in removed}:
        for path in (hour, hour.parent):
            if directory in path.parents:
                with suppress(OSError):  # the directory is not empty
                    path.rmdir()
