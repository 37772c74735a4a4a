"""Segments: the Parquet files of events, their names, and the content of their footers.

A path is <events>/<table>/<YYYY-MM-DD>/<HH>/<first>-<last>.<crc>.parquet, with the hour (UTC) of writing. Each commit
of a table has a number. A merged file has the first and the last number of its parts, and supersedes every file of its
directory with numbers in that range. So the rename that creates the merged file also replaces its parts, for every
reader that lists the directory. The name has the CRC-32 of the file, because DuckDB, unlike pyarrow, does not verify
the checksums of pages: flipped bits would be read as other numbers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.contracts.errors import CheckpointError, DataError, MegatrainError
from megatrain.contracts.exit_codes import ExitCode
from megatrain_diagnostics.columns.schema import (
    check_columns,
    kind_of,
    names_of,
    time_column,
)
from megatrain_diagnostics.events.tables import StepTotals, Table, columns_of
from megatrain_diagnostics.store.parquet_limits import check_pages, opened_parquet

SUFFIX = ".parquet"
DAMAGED_SUFFIX = ".parquet.damaged"
"""The writer renames a damaged segment to this suffix; it is kept for inspection, and readers skip it."""
AHEAD_KEY = b"megatrain_ahead_ns"
"""Footer entry with `Segment.ahead_ns`."""
_ROWS_OF_GROUP = 131_072
"""Rows of a row group: a DuckDB thread reads whole row groups, and skips row groups by their statistics."""
_ROWS_OF_OPERATION_GROUP = 16_384
"""Rows of a row group if rows are sorted by operation: about one operation of one step of 12,288 ranks."""
_DELTA_COLUMNS = ("rank", "sequence", "start_ns", "at_ns", "duration_ns", "launch_ns", "sum_ns", "max_ns")
"""Integer columns with too many distinct values for a dictionary, which would be built and then discarded."""
_READ_BYTES = 1 << 20
_CHECKED_ROWS = 65_536
_LEVEL = 1  # of zstd: with level 3, files are 4 % smaller, but writing takes 1.4 times as long
_NAME = re.compile(r"(\d{12,18})-(\d{12,18})\.([0-9a-f]{8})\.parquet")
_BOUNDED = ("round", "rank", "step", "start_ns", "at_ns")
"""Columns whose bounds select segments: readers filter by them."""


class StoreError(MegatrainError):
    """Events could not be written. Committed segments are intact; uncommitted events are still in memory."""

    exit_code = ExitCode.SAVE_FAILED


@dataclass(frozen=True, slots=True)
class SegmentName:
    """The parts of a segment's name."""

    first: int
    last: int
    crc: int

    @property
    def text(self) -> str:
        return f"{self.first:012d}-{self.last:012d}.{self.crc:08x}{SUFFIX}"

    def covers(self, other: SegmentName) -> bool:
        """Return whether this segment supersedes another of its directory."""
        is_within = self.first <= other.first and other.last <= self.last
        return is_within and (self.first, self.last) != (other.first, other.last)


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment and the content of its footer. `bounds`: column -> (least, greatest value), if known."""

    path: Path
    kind: type[Table]
    num_rows: int
    bounds: Mapping[str, tuple[int, int]]
    ahead_ns: int
    """The latest time of its rows minus the time of writing by the daemon's clock, in ns; above 0: from the future."""


def parse_name(name: str) -> SegmentName | None:
    """Return the parts of a file's name; None if it is not the name of a segment."""
    found = _NAME.fullmatch(name)
    return None if found is None else SegmentName(int(found[1]), int(found[2]), int(found[3], 16))


def not_superseded(paths: Sequence[Path]) -> list[Path]:
    """Return the paths without those that a merged file of the same directory supersedes."""
    merged: dict[Path, list[SegmentName]] = {}
    named = [(path, parse_name(path.name)) for path in paths]
    for path, name in named:
        if name is not None and name.last > name.first:
            merged.setdefault(path.parent, []).append(name)
    return [
        path
        for path, name in named
        if name is None or not any(other.covers(name) for other in merged.get(path.parent, ()))
    ]


def hour_directory(table_directory: Path, unix_ns: int) -> Path:
    """Return the directory for files that are written at this time."""
    moment = datetime.fromtimestamp(unix_ns // 10**9, UTC)
    return table_directory / f"{moment:%Y-%m-%d}" / f"{moment:%H}"


def end_of_hour_ns(directory: Path) -> int | None:
    """Return the end of a directory's hour in unix ns; None if it is not the directory of an hour."""
    try:
        begin = datetime.strptime(f"{directory.parent.name} {directory.name}", "%Y-%m-%d %H").replace(tzinfo=UTC)
    except ValueError:
        return None
    return int((begin + timedelta(hours=1)).timestamp()) * 10**9


def read_footer(path: Path) -> Segment:
    """Read the footer of a segment. Raises: DataError if the file is not a segment; FileNotFoundError."""
    try:
        with opened_parquet(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = "empty" if _is_empty(path) else f"not a whole Parquet file ({_first_line(error)})"
        raise DataError(f"{path}: {reason}") from error
    try:
        kind = kind_of(schema)
        check_columns(kind, schema)
        _check_names(schema)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    if without := _without_values(schema, groups):
        raise DataError(f"{path}: {without}: rows without a value")
    ahead = (schema.metadata or {}).get(AHEAD_KEY, b"0")
    return Segment(
        path=path,
        kind=kind,
        num_rows=metadata.num_rows,
        bounds=_bounds(schema, groups),
        ahead_ns=int(ahead) if re.fullmatch(rb"-?\d{1,18}", ahead) else 0,
    )


def write_segment(directory: Path, first: int, last: int, table: pa.Table, ahead_ns: int) -> Path:
    """Write the rows of a table, in file form, atomically and durably. Raises: StoreError.

    Totals of steps are sorted by operation: a heat map needs one operation, and skips the row groups of the others.
    """
    is_of_totals = kind_of(table.schema) is StepTotals
    if is_of_totals:
        table = _by_operation(table)
    delta = [name for name in _DELTA_COLUMNS if name in table.schema.names]
    sink = pa.BufferOutputStream()
    metadata = {**(table.schema.metadata or {}), AHEAD_KEY: str(ahead_ns).encode()}
    pq.write_table(
        table.replace_schema_metadata(metadata),
        sink,
        compression="zstd",
        compression_level=_LEVEL,
        row_group_size=_ROWS_OF_OPERATION_GROUP if is_of_totals else _ROWS_OF_GROUP,
        use_dictionary=[name for name in table.schema.names if name not in delta],
        column_encoding=dict.fromkeys(delta, "DELTA_BINARY_PACKED"),
    )
    content = sink.getvalue().to_pybytes()
    path = directory / SegmentName(first, last, zlib.crc32(content)).text
    try:
        LocalLocation(path).write(content)
    except CheckpointError as error:
        raise StoreError(f"events: {error}") from error
    return path


def _by_operation(table: pa.Table) -> pa.Table:
    """Return rows sorted by operation; rows of the same operation keep their order."""
    numbers = table.column("operation").unify_dictionaries().combine_chunks().indices
    return table.take(np.argsort(numbers.to_numpy(), kind="stable"))


def is_intact(path: Path) -> bool:
    """Return whether a file matches the checksum in its name; True for a name without a checksum.

    Raises: FileNotFoundError; OSError if the file cannot be read.
    """
    name = parse_name(path.name)
    if name is None:
        return True
    crc = 0
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            crc = zlib.crc32(part, crc)
    return crc == name.crc


def damage_of_pages(segment: Segment) -> str:
    """Return why a segment would take too much memory, from its page headers and texts; "" if it would not.

    Raises: FileNotFoundError.
    """
    try:
        check_pages(segment.path, texts_of(segment.kind))
    except FileNotFoundError:
        raise
    except DataError as error:
        return str(error).removeprefix(f"{segment.path}: ")
    except (pa.ArrowException, OSError, ValueError) as error:
        return f"cannot be read whole ({_first_line(error)})"
    return ""


def damage_of_rows(segment: Segment) -> str:
    """Check every row of a segment; return the first problem, or "".

    Raises: FileNotFoundError.
    """
    if damage := damage_of_pages(segment):
        return damage
    try:
        with opened_parquet(segment.path, texts_of(segment.kind)) as file:
            for batch in file.iter_batches(_CHECKED_ROWS):
                # invalid Unicode is found here
                batch.validate(full=True)
                if without := [name for name in batch.schema.names if batch.column(name).null_count]:
                    raise DataError(f"{segment.kind.NAME}.{without[0]}: rows without a value")
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError, DataError) as error:
        return f"cannot be read whole ({_first_line(error)})"
    return ""


def ahead_of(kind: type[Table], table: pa.Table, written_ns: int) -> int:
    """Return the latest time of the rows minus the time of writing, in ns; negative if all rows are earlier."""
    column = time_column(kind)
    if column is None or not table.num_rows:
        return 0
    latest = max(int(chunk.to_numpy(zero_copy_only=False).max()) for chunk in table.column(column).chunks if len(chunk))
    return latest - written_ns


def texts_of(kind: type[Table]) -> list[str]:
    """Return the columns of a table that hold text of any length."""
    return [name for name, dtype in columns_of(kind).items() if dtype == "text"]


def _check_names(schema: pa.Schema) -> None:
    """Raise DataError if a column of names has numbers: DuckDB cannot read such a file together with others."""
    for name in schema.names:
        if names_of(name) is not None and pa.types.is_integer(schema.field(name).type):
            raise DataError(f"{name} is stored as numbers; files store names")


def _bounds(schema: pa.Schema, groups: Sequence[pq.RowGroupMetaData]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for number, name in enumerate(schema.names):
        if name not in _BOUNDED or not groups:
            continue
        statistics = [group.column(number).statistics for group in groups]
        if all(statistic is not None and statistic.has_min_max for statistic in statistics):
            found[name] = (
                min(statistic.min for statistic in statistics),
                max(statistic.max for statistic in statistics),
            )
    return found


def _without_values(schema: pa.Schema, groups: Sequence[pq.RowGroupMetaData]) -> str:
    """Return the first column with missing values according to the footer; the daemon writes none."""
    for number, name in enumerate(schema.names):
        if schema.field(name).nullable:
            statistics = [group.column(number).statistics for group in groups]
            if any(statistic is not None and statistic.null_count for statistic in statistics):
                return str(name)
    return ""


def _is_empty(path: Path) -> bool:
    try:
        return path.stat().st_size == 0
    except OSError:
        return False


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
