"""Merges small segments: a daemon writes one per table and commit, and a reader must read the footer of each.

In the directory of an hour, segments with consecutive numbers are merged and sorted by step and rank (sums by operation
first), so that queries of some steps or ranks skip most row groups. Duplicate rows are removed. By its name, the new
file supersedes the old files at once; they are deleted after a minute, because readers may still be about to open them.
The size of one merge is limited, and so is the memory for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.columns.schema import from_arrow, to_arrow, to_stored
from megatrain_diagnostics.events.source import in_order
from megatrain_diagnostics.events.tables import TABLES, Table, columns_of, joined, select
from megatrain_diagnostics.store.segments import (
    SUFFIX,
    Segment,
    SegmentName,
    end_of_hour_ns,
    is_intact,
    not_superseded,
    parse_name,
    read_footer,
    write_segment,
)

MAX_BYTES = 16 * 2**20
"""Compressed size of a merged file: about 1.5 million rows, which take 300 MB to sort."""
MAX_SMALL_FILES = 64
"""This many small files, or half of MAX_BYTES, are merged before their hour has ended."""
HOUR_IS_OVER_NS = 120 * 10**9
"""Time after the end of an hour until all commits that began in it are finished."""
GRACE_S = 60.0
"""The time for which superseded files are kept for readers that have listed but not yet opened them."""


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A file that may be merged."""

    path: Path
    name: SegmentName
    num_bytes: int


def compact(directory: Path, now_ns: int) -> None:
    """Merge the files of a directory that only this process writes.

    Raises: StoreError when a merged file cannot be written; OSError when a file cannot be read or renamed.
    """
    for kind in TABLES:
        for hour, end_ns in hour_directories(directory / kind.NAME):
            _compact_hour(kind, hour, is_over=now_ns > end_ns + HOUR_IS_OVER_NS)


def hour_directories(table_directory: Path) -> Iterator[tuple[Path, int]]:
    """Yield (directory of an hour, end of that hour in unix ns) of a table, the oldest first."""
    for path in sorted(table_directory.glob("*-*-*/*")):
        end_ns = end_of_hour_ns(path)
        if end_ns is not None and path.is_dir():
            yield path, end_ns


def plan_merges(files: Sequence[SmallFile], *, is_over: bool) -> list[tuple[SmallFile, ...]]:
    """Return the groups of an hour's files that are to be merged; the files of a group have consecutive numbers.

    A file of at least half the allowed size is not merged.
    """
    runs: list[list[SmallFile]] = [[]]
    for file in sorted(files, key=lambda file: file.name.first):
        if 2 * file.num_bytes >= MAX_BYTES:
            runs.append([])
        elif sum(run.num_bytes for run in runs[-1]) + file.num_bytes > MAX_BYTES:
            runs.append([file])
        else:
            runs[-1].append(file)
    return [tuple(run) for run in runs if len(run) > 1 and (is_over or _is_worth_it(run))]


def _is_worth_it(run: Sequence[SmallFile]) -> bool:
    return len(run) >= MAX_SMALL_FILES or 2 * sum(file.num_bytes for file in run) >= MAX_BYTES


def _compact_hour(kind: type[Table], hour: Path, *, is_over: bool) -> None:
    paths = [path for path in hour.glob(f"[!.]*{SUFFIX}") if parse_name(path.name) is not None]
    valid = not_superseded(paths)
    _remove_superseded(set(paths) - set(valid), valid)
    for run in plan_merges([_small_file(path) for path in valid], is_over=is_over):
        _merge(kind, hour, run)


def _small_file(path: Path) -> SmallFile:
    name = parse_name(path.name)
    assert name is not None, path
    return SmallFile(path, name, path.stat().st_size)


def _remove_superseded(superseded: set[Path], valid: Sequence[Path]) -> None:
    """Remove files that a merged file has superseded for longer than GRACE_S."""
    for path in superseded:
        name = parse_name(path.name)
        assert name is not None, path
        covers = [
            segment for segment in valid if (other := parse_name(segment.name)) is not None and other.covers(name)
        ]
        with suppress(OSError):
            if any(time.time() - segment.stat().st_mtime > GRACE_S for segment in covers):
                path.unlink()


def _merge(kind: Any, hour: Path, run: Sequence[SmallFile]) -> None:
    """Merge the files of a run. If one is damaged, only set it aside: the next compaction merges the others."""
    parts: list[Any] = []
    is_damaged = False
    ahead_ns = 0
    for file in run:
        try:
            segment = read_footer(file.path)
            parts.append(_rows(kind, segment))
            ahead_ns = max(ahead_ns, segment.ahead_ns)
        except (DataError, pa.ArrowException):
            os.replace(file.path, file.path.with_name(file.path.name + ".damaged"))
            is_damaged = True
    if is_damaged:
        return
    rows = by_step(in_order(joined(kind, parts)))
    write_segment(hour, run[0].name.first, run[-1].name.last, to_stored(kind, to_arrow(rows)), ahead_ns)


def _rows(kind: Any, segment: Segment) -> Any:
    """Return a segment's rows. Raises: DataError if the segment is damaged, or has another table."""
    if segment.kind.NAME != kind.NAME:
        raise DataError(f"{segment.path}: holds the table {segment.kind.NAME}")
    if not is_intact(segment.path):
        raise DataError(f"{segment.path}: its checksum does not match")
    try:
        return from_arrow(kind, pq.read_table(segment.path))
    except DataError as error:
        raise DataError(f"{segment.path}: {error}") from error


def by_step(table: Any) -> Any:
    """Return rows sorted by round, step and rank; the input must be sorted by round and rank."""
    if "step" not in columns_of(type(table)):
        return table
    return select(table, np.lexsort([table.step, table.round]))
