"""Finds the segments in a directory for a reader, while segments appear and disappear, and some are damaged.

Each file's footer is read once. An unusable segment is skipped and reported; other segments are not affected.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from megatrain.contracts.errors import DataError
from megatrain.formatting import printable
from megatrain_diagnostics.columns.schema import table_named
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Table, columns_of
from megatrain_diagnostics.store.segments import (
    DAMAGED_SUFFIX,
    SUFFIX,
    Segment,
    damage_of_pages,
    damage_of_rows,
    is_intact,
    not_superseded,
    parse_name,
    read_footer,
)

MAX_AHEAD_NS = 3600 * 10**9
"""Segments with rows further ahead of the daemon's clock are reported: one of the clocks is wrong."""


class Catalog:
    """The segments below a directory. Safe to use from many threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._footers: dict[Path, Segment | None] = {}
        """None: the segment is unusable."""
        self._checked: set[Path] = set()
        self._problems: dict[str, None] = {}

    def segments(self, kind: type[Table], where: Where) -> list[Segment]:
        """Return the segments of a table that may contain rows that match `where`.

        Raises: DataError when the directory cannot be listed.
        """
        paths, damaged = self._list(kind)
        with self._lock:
            for path in damaged:
                self._record_problem(f"{path}: was found damaged by the daemon; its events are missing")
            found = [footer for path in not_superseded(paths) if (footer := self._footer(path)) is not None]
            mine = [segment for segment in found if segment.kind is kind]
            for segment in found:
                if segment.ahead_ns > MAX_AHEAD_NS:
                    hours = segment.ahead_ns / MAX_AHEAD_NS
                    self._record_problem(
                        f"{segment.path}: has events from the future, up to {hours:.1f} h ahead of the daemon"
                    )
                if segment.kind is not kind and kind.NAME in segment.path.relative_to(self.directory.parent).parts:
                    self._record_problem(f"{segment.path}: holds the table {segment.kind.NAME}; it was set aside")
        return [segment for segment in mine if may_have(segment, where)]

    def intact(self, segments: Sequence[Segment]) -> list[Segment]:
        """Return the undamaged segments; damaged segments are reported and not used again.

        Raises: FileNotFoundError when a segment no longer exists.
        """
        with self._lock:
            fresh = [segment for segment in segments if segment.path not in self._checked]
        if fresh:
            with ThreadPoolExecutor(min(len(fresh), 4)) as pool:
                self._judge(fresh, list(pool.map(_fault, fresh)))
        with self._lock:
            return [segment for segment in segments if self._footers.get(segment.path) is not None]

    def set_aside(self, path: Path, reason: str) -> None:
        """Stop using a segment, and add the reason to `problems`."""
        with self._lock:
            self._footers[path] = None
            self._record_problem(f"{path}: {reason}")

    def record_problem(self, problem: str) -> None:
        """Add a sentence to `problems`."""
        with self._lock:
            self._record_problem(problem)

    def problems(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._problems)

    def is_empty(self) -> bool:
        """Return whether no file below the directory has the suffix of a segment. Raises: DataError."""
        return next(_walk(self.directory, None), None) is None

    def _list(self, kind: type[Table]) -> tuple[list[Path], list[Path]]:
        paths: list[Path] = []
        damaged: list[Path] = []
        for path in _walk(self.directory, kind):
            (damaged if path.name.endswith(DAMAGED_SUFFIX) else paths).append(path)
        return sorted(paths), sorted(damaged)

    def _footer(self, path: Path) -> Segment | None:
        if path not in self._footers:
            try:
                self._footers[path] = read_footer(path)
            except FileNotFoundError:  # merged or removed since the directory was listed
                return None
            except DataError as error:
                self._footers[path] = None
                self._record_problem(f"{error}; it was set aside")
        return self._footers[path]

    def _judge(self, segments: Sequence[Segment], faults: Sequence[str]) -> None:
        for segment, fault in zip(segments, faults, strict=True):
            if fault:
                self.set_aside(segment.path, f"{fault}; it was set aside")
            else:
                with self._lock:
                    self._checked.add(segment.path)

    def _record_problem(self, problem: str) -> None:
        self._problems[printable(problem)] = None


def may_have(segment: Segment, where: Where) -> bool:
    """Return whether a segment can contain rows that match `where`, according to the bounds of its columns."""
    bounds = segment.bounds

    def overlaps(column: str, first: int | None, last: int | None) -> bool:
        if column not in bounds:
            return True
        least, most = bounds[column]
        return (first is None or most >= first) and (last is None or least <= last)

    def includes(column: str, values: tuple[int, ...] | None) -> bool:
        if values is None or column not in bounds:
            return True
        least, most = bounds[column]
        return any(least <= value <= most for value in values)

    time = "start_ns" if "start_ns" in columns_of(segment.kind) else "at_ns"
    return (
        overlaps("step", where.first_step, where.last_step)
        and overlaps(time, where.first_ns, where.last_ns)
        and includes("round", where.rounds)
        and includes("rank", where.ranks)
    )


def _fault(segment: Segment) -> str:
    """Return why a segment is unusable, or "". If its name has no checksum, every row is checked."""
    try:
        if parse_name(segment.path.name) is None:
            return damage_of_rows(segment)
        return damage_of_pages(segment) if is_intact(segment.path) else "its checksum does not match"
    except FileNotFoundError:
        raise
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _walk(directory: Path, kind: type[Table] | None) -> Iterator[Path]:
    """Yield the segments below a directory, except those in directories named after other tables.

    Raises: DataError when the directory itself cannot be listed.
    """
    try:
        entries = _entries(directory)
    except OSError as error:
        raise DataError(f"{directory}: cannot be listed: {error.strerror}") from error
    for entry in entries:
        other = table_named(entry.name)
        if kind is None or other is None or other is kind:
            yield from _segments_at(entry)


def _segments_at(entry: os.DirEntry[str]) -> Iterator[Path]:
    if entry.is_dir(follow_symlinks=False):
        with suppress(OSError):  # the directory has expired in the meantime
            for below in _entries(Path(entry.path)):
                yield from _segments_at(below)
    elif entry.name.endswith((SUFFIX, DAMAGED_SUFFIX)) and entry.is_file():  # opening a FIFO would block for ever
        yield Path(entry.path)


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]
