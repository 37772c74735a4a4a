"""Reads records of <run>/metrics/metrics.jsonl in bounded time.

A file that is not larger than the limit is read whole. Of a larger one, evenly spread pieces are read, including the
first and the last, so that a run of a million steps costs no more than one of ten thousand. A part of the run is found
by bisection on the times of the records.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatrain.contracts.files.bounded_files import open_below
from megatrain.run_files.run_directory import RunDirectory
from megatrain_diagnostics.events.tables import Float64, Int64

Record = dict[str, object]

_LARGEST_STEP = 2**53
_PIECE_BYTES = 8192
"""A piece holds about twenty records of a run with one source of data."""
_LINES_PER_PIECE = 4
"""A piece holds at least this many of the newest lines, which are long where a run has many sources."""
_PROBE_DIVISOR = 8
"""The size of a piece follows from the newest lines: this fraction (1 / 8) of the limit is read at the end of the file
to find them."""


@dataclass(frozen=True, slots=True)
class MetricsRecords:
    """The records that were read, in the order of the file."""

    records: tuple[Record, ...] = ()
    is_sampled: bool = False
    """Whether the requested part is so large that only pieces of it were read."""


def read_metrics_records(
    run: RunDirectory, most_bytes: int, begin_s: float | None = None, end_s: float | None = None
) -> MetricsRecords:
    """Return the records of a run from one unix time to another, both included; None: no bound.

    The answer may hold records outside of the times: all others if the file has at most `most_bytes`, else a few. It
    is empty if the run has not reported anything yet.
    Raises: OSError if the file exists but cannot be read.
    """
    try:
        descriptor = open_below(run.root, str(run.metrics_file.relative_to(run.root)))
    except FileNotFoundError:
        return MetricsRecords()
    with open(descriptor, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= most_bytes:
            lines = os.pread(file.fileno(), size, 0).split(b"\n")
            return MetricsRecords(tuple(map(_record, lines)))
        begin, end = 0, size
        piece = _piece_bytes(file.fileno(), size, most_bytes // _PROBE_DIVISOR)
        if begin_s is not None:
            begin = _offset_before(file.fileno(), size, piece, begin_s)
        if end_s is not None:
            # the record at `end_s` begins at most one piece later, and a piece is longer than a record
            end = min(size, _offset_before(file.fileno(), size, piece, end_s) + 2 * piece)
        most_bytes -= most_bytes // _PROBE_DIVISOR
        is_sampled = end - begin > most_bytes
        offsets = (
            np.linspace(begin, end - piece, most_bytes // piece).astype(np.int64).tolist() if is_sampled else [begin]
        )
        length = piece if is_sampled else end - begin
        lines = [line for offset in offsets for line in _whole_lines(file.fileno(), size, offset, length)]
    return MetricsRecords(tuple(map(_record, lines)), is_sampled)


def reported_step(record: Record) -> int | None:
    """Return the step that a record reports; None if it does not report a step."""
    step = finite_number(record, "step")
    return int(step) if record.get("kind") == "step" and 0 < step <= _LARGEST_STEP else None


def is_last_report(steps: Float64 | Int64) -> npt.NDArray[np.bool_]:
    """Return for each report of a step whether neither this step nor an earlier one was reported after it."""
    later = np.minimum.accumulate(steps[::-1])[::-1]
    return np.asarray(steps < np.append(later[1:], np.inf))


def finite_number(record: Record, name: str) -> float:
    """Return a number of a record; NaN if it is missing, not a number, or not finite."""
    value = record.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def _piece_bytes(descriptor: int, size: int, probe: int) -> int:
    """Return the size of a piece in bytes, from the longest of the newest lines: those in the last `probe` bytes."""
    newest = os.pread(descriptor, probe, max(0, size - probe)).split(b"\n")
    return min(max(_PIECE_BYTES, _LINES_PER_PIECE * max(map(len, newest))), _LINES_PER_PIECE * probe // 2)


def _offset_before(descriptor: int, size: int, piece: int, at_s: float) -> int:
    """Return an offset at most one piece before the first record at or after `at_s`; records before it are earlier."""
    low, high = 0, size
    while high - low > piece:
        middle = (low + high) // 2
        if _first_time(os.pread(descriptor, piece, middle)) < at_s:
            low = middle
        else:
            high = middle
    return low


def _first_time(part: bytes) -> float:
    """Return the time of the first whole record of a part of the file; infinity if it holds none."""
    times = (finite_number(_record(line), "unix_time_s") for line in part.split(b"\n")[1:-1])
    return next((at_s for at_s in times if math.isfinite(at_s)), math.inf)


def _whole_lines(descriptor: int, size: int, offset: int, length: int) -> list[bytes]:
    """Return the lines of a part of the file, without incomplete lines at its ends."""
    lines = os.pread(descriptor, length, offset).split(b"\n")
    return lines[0 if offset == 0 else 1 : len(lines) if offset + length >= size else -1]


def _record(line: bytes) -> Record:
    """Return the JSON object of a line; an empty one for a line that a crash cut off or that no trainer wrote."""
    try:
        found = json.loads(line) if line.startswith(b"{") else None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
